"""`python -m eprt.serve`: the OpenAI-compatible server.

    python -m eprt.serve -n 4 --model DIR            # starts mpirun itself; drains on SIGTERM and Ctrl-C
    mpirun -n 4 python -m eprt.serve --model DIR     # under an mpirun of your own
    python -m eprt.serve --model DIR                 # one rank, no MPI

Exit status: 0 drained and stopped, 1 something was lost, 2 a flag, file or address is wrong.
"""

import socket
import sys
import time

from eprt import env
from eprt.serve.options import OptionError, parse

# The first rank that ends with another status than 0 ends mpirun's whole job, heard or not.
RANK_0_SPEAKS_FIRST_S = 10.0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    rank = env.launched_rank()
    try:
        try:
            env.check()
        except ValueError as error:
            raise OptionError(str(error)) from None
        options = parse(argv)
        if rank is None and (options.num_ranks or 1) > 1:
            from eprt.serve import launch

            return launch.launch(options, argv)
        from eprt.serve import rank_main

        return rank_main.run(options)
    except OptionError as error:
        return _tell(error, rank)


def _tell(error: OptionError, rank: int | None) -> int:
    """One line on standard error; returns the exit status.

    Most mistakes all ranks find: rank 0 tells of them and mpirun ends the rest, which wait for that. A folder that only
    another host lacks, rank 0 does not miss: a rank that still lives after the wait tells of it with its name.
    """
    if rank:
        time.sleep(RANK_0_SPEAKS_FIRST_S)
    teller = f"rank {rank} on {socket.gethostname()}: " if rank else ""
    print(f"eprt serve: error: {teller}{error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
