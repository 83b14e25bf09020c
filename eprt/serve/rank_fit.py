"""Whether the ranks that there are can do what was asked for, wherever their number comes from: a flag, the default, an
MPI job, or an instance that joins. Loads no torch, and knows nothing of how flags are parsed.
"""

from collections.abc import Sequence

from eprt import env
from eprt.config import EngineConfig
from eprt.serve.options import OptionError, ServeOptions


def why_no_teams(engine: EngineConfig, num_ranks: int) -> str:
    """Why num_ranks ranks cannot share attention, with the remedy; "" where they can. Teams of --prompt-ranks are
    smaller where an instance has fewer ranks."""
    size = engine.attention_tp
    if num_ranks % size == 0:
        return ""
    ranks = "1 rank makes" if num_ranks == 1 else f"{num_ranks} ranks make"
    return f"--attention-tp {size}: {ranks} no teams of {size}; must be a multiple of it"


def num_nodes(options: ServeOptions) -> int:
    """Hosts, or the virtual nodes that EPRT_RANKS_PER_NODE makes of them; mpirun may start ranks on more."""
    per_node = env.get("EPRT_RANKS_PER_NODE")
    return options.nnodes if per_node is None else options.nnodes * -(-(options.num_ranks or 1) // per_node)


def check_ranks(options: ServeOptions, num_ranks: int, num_nodes: int, whose: str, remedy: str) -> None:
    """OptionError where these ranks of one group cannot do what was asked for, in one line.

    Args:
        whose: "without -n there" or the like, before "are 2 ranks".
        remedy: how one gets another number of ranks.
    """
    engine = options.engine
    check_faults(options.inject, num_ranks)
    if num_nodes > 1:
        _check_memory_is_shared(engine, num_nodes)
    there = f"{whose} {'is 1 rank' if num_ranks == 1 else f'are {num_ranks} ranks'}"
    if engine.prompt_ranks > num_ranks:
        raise OptionError(f"--prompt-ranks {engine.prompt_ranks}: {there}; {remedy}, or leave it out")
    if why_no_teams(engine, num_ranks):
        size = engine.attention_tp
        raise OptionError(
            f"--attention-tp {size}: {there}, of which no teams of {size} can be made; {remedy}, a multiple of {size}"
        )


def _check_memory_is_shared(engine: EngineConfig, num_nodes: int) -> None:
    for flag, value, asked, what in (
        ("--prompt-ranks", engine.prompt_ranks, engine.prompt_ranks > 1, "ranks that compute one prompt"),
        ("--attention-tp", engine.attention_tp, engine.attention_tp > 1, "ranks that share attention"),
        ("--expert-host-copies", "node", engine.expert_host_copies == "node", "ranks that read one copy of experts"),
    ):
        if asked:
            raise OptionError(f"{flag} {value}: {what} share memory, and these are of {num_nodes} nodes; leave it out")


def check_faults(faults: Sequence[str], num_ranks: int | None) -> None:
    """OptionError for a fault of --inject that cannot be, or is of a rank that does not exist. None: not known yet."""
    if not faults:
        return
    from eprt.diagnostics.inject import Injection

    for fault in faults:
        try:
            injection = Injection.parse(fault)
            if num_ranks is not None:
                injection.check_ranks(num_ranks)
        except ValueError as error:
            raise OptionError(f"--inject {error}") from None
