"""`python -m eprt.serve`: the OpenAI-compatible server. Decides which role this process has, and knows no more.

    python -m eprt.serve -n 4 --model DIR            # starts the ranks itself; drains on SIGTERM and Ctrl-C
    mpirun -n 4 python -m eprt.serve --model DIR     # under an mpirun of your own
    python -m eprt.serve --model DIR                 # one rank for each NUMA node, no MPI
    python -m eprt.serve -n 4 --model DIR --nnodes 2 --node-rank 0 --dist-init-addr HOST:PORT    # likewise on host 1

Exit status: 0 drained and stopped, 1 something was lost, 2 a flag, file or address is wrong.
"""

import sys
from dataclasses import replace

from eprt import env
from eprt.serve.default_ranks import default_ranks
from eprt.serve.errors import report_mistake
from eprt.serve.flags import parse_options
from eprt.serve.options import OptionError, ServeOptions
from eprt.serve.rank_fit import check_ranks, num_nodes


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    rank = env.launched_rank()
    env.let_openmp_sleep()
    try:
        try:
            env.check()
        except ValueError as error:
            raise OptionError(str(error)) from None
        options = parse_options(argv)
        if options.engine.device == "cpu":
            env.let_torch_use_huge_pages()
        if options.uses_wire:
            return _serve_over_wire(options)
        given, by_default = options.num_ranks, options.engine.device == "cpu" and not env.why_mpirun()
        if rank is None and given is None and by_default:
            options = replace(options, num_ranks=default_ranks())
        if rank is None:
            _check_ranks(options, given)
        if options.dry_run:
            from eprt.serve import dry_run

            return dry_run.run(options)
        if rank is None and ((options.num_ranks or 1) > 1 or options.num_instances):
            if why := env.why_mpirun():
                if options.max_lost_ranks:
                    raise OptionError(f"--max-lost-ranks needs ranks that eprt starts on one host, but {why}")
                if options.num_instances:
                    raise OptionError(f"--decode needs instances that eprt starts on one host, but {why}")
                from eprt.serve.ranks import launch

                return launch.launch(options, argv)
            from eprt.serve.ranks import host_launch

            return host_launch.launch(options)
        from eprt.serve.ranks import main as rank_main

        return rank_main.run(options)
    except OptionError as error:
        report_mistake("eprt serve: error", error, rank)
        return 2


def _serve_over_wire(options: ServeOptions) -> int:
    if env.started_by_open_mpi():
        flag = "--nnodes" if options.nnodes > 1 else "--wire"
        raise OptionError(f"{flag}: eprt starts the ranks of each host itself; leave out mpirun, or {flag}")
    given = options.num_ranks
    if given is None:
        options = replace(options, num_ranks=default_ranks())
    _check_ranks(options, given)
    if options.dry_run:
        from eprt.serve import dry_run

        return dry_run.run(options)
    from eprt.serve.hosts import launch

    return launch.launch(options)


def _check_ranks(options: ServeOptions, given: int | None) -> None:
    """given: by -n. An MPI job's ranks check themselves (ranks/main.py)."""
    if not options.num_instances:
        whose = "without -n there" if given is None else "there"
        check_ranks(options, options.total_ranks, num_nodes(options), whose, "give -n")


if __name__ == "__main__":
    sys.exit(main())
