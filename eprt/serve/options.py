"""ServeOptions: what a server was asked for, and FrontendConfig, which carries it to the frontend's process.

Knows nothing of how the options are given (flags.py).
"""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from eprt.bind import DEFAULT_POLICY
from eprt.config import EngineConfig
from eprt.serve.keys import NO_KEYS, ServerKeys
from eprt.serve.tiers.tier import Tier

MOST_RANKS = 1024  # of a host, and of an instance


class OptionError(ValueError):
    """A flag that cannot be served; str() is the one line to print."""


@dataclass(frozen=True)
class ServeOptions:
    """What one server was asked for, checked by flags.parse_options."""

    engine: EngineConfig  # of each rank
    model_name: str  # what clients call the model
    model_aliases: tuple[str, ...] = ()  # further names of it
    host: str = "127.0.0.1"
    port: int = 8000
    dry_run: bool = False  # tell the memory that ranks would take, and start none
    bind: str = DEFAULT_POLICY
    # -n; None: as many as the mpirun that started this process says, else default_ranks.py on CPUs and one on a GPU.
    num_ranks: int | None = None
    nnodes: int = 1  # hosts, on each of which a launcher starts num_ranks ranks
    node_rank: int = 0  # of this host
    dist_init_addr: str | None = None  # HOST:PORT of host 0, where the hosts meet
    dist_timeout_s: float = 300.0  # until all hosts have come
    # WireOptions as text: the ranks are a WireGroup, on one host too. None: "tcp" between hosts, shared memory on one.
    wire: str | None = None
    skip_tokenizer_init: bool = False
    chat_template: str | None = None  # a file; None: the checkpoint's own template
    trust_request_chat_template: bool = False  # requests may bring chat templates of their own
    tool_call_parser: str = "auto"  # a name of openai/tools.py, or none; auto: what the chat template shows
    reasoning_parser: str = "auto"  # likewise, of openai/reasoning.py
    api_key: str | None = None  # this and the next three: see keys.py
    api_key_file: str | None = None
    admin_key: str | None = None
    admin_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call the server from a browser; "*" for all
    ssl_certfile: str | None = None  # PEM; None: plain HTTP
    ssl_keyfile: str | None = None  # None: in the same file
    keep_alive_s: float = 75.0  # how long a connection may wait for its next request
    request_log: bool = True  # a line for each request
    drain_timeout_s: float = 30.0  # how long a stopping server waits for running requests
    max_body_bytes: int = 8 << 20  # larger request bodies are refused
    body_timeout_s: float = 60.0  # within which a request body must have arrived
    diagnose_dir: str | None = None  # where the diagnosis log is written; None: nowhere
    diagnose_window_s: float = 10.0
    diagnose_log_bytes: int = 1 << 30  # most that the log's files take together
    inject: tuple[str, ...] = ()  # faults on purpose, as eprt.diagnostics.inject reads them
    rebalance: str = "off"  # "off" (only placements and plans that are posted), "auto" or "dry-run"
    rebalance_slow_ranks: bool = False  # plans give less load to ranks that the diagnosis finds slow
    us_per_crossing: float = 0.4  # see TriggerConfig
    load_window_s: float = 5.0  # length of a window of expert load
    migration_timeout_s: float = 120.0  # deadline of each round of a migration
    max_lost_ranks: int = 0  # ranks that may be gone while the others serve on; 0: the first loss ends the server
    # How long others wait for a rank before it is given up; None: as hang_judge.py finds.
    hang_timeout_s: float | None = None
    # For which none of the ranks that load together may get on, until one of them is given up.
    load_timeout_s: float = 600.0
    # What was lost with a rank is read while the others serve without it; their answers say so.
    serve_without_experts: bool = False
    restart_lost_ranks: bool = False  # the launcher starts a process in the place of a rank that was lost
    num_prefill: int = 0  # instances that compute prompts; 0 (and 0 decode instances): one group of ranks does all
    num_decode: int = 0  # instances that go on behind the first token
    prefill_ranks: int = 1  # of each prefill instance
    decode_ranks: int = 1  # of each decode instance
    # A decode instance computes a prompt itself where its prefix cache lacks no more tokens than this.
    local_prefill_tokens: int = 256
    handoff_timeout_s: float = 30.0  # how long pages are held; then the decode instance computes them itself
    join_address: tuple[str, int] | None = None  # where ranks of other hosts connect; None: none can; port 0: any
    page_reader: str = "tcp"  # by which hosts read each other's pages (kv/reader.py)
    tiers: tuple[Tier, ...] = ()  # of service, in the order in which they go first; empty: all requests are alike
    default_tier: str = ""  # of requests that name none; "": the last
    start_instance_command: str | None = None  # what starts a further instance; None: the launcher
    scale: str = "off"  # "auto": instances are started and retired by predicted times; "advise": that is only said
    scale_prefill: tuple[int, int] | None = None  # fewest and most instances; None: from 1 to twice those of the start
    scale_decode: tuple[int, int] | None = None
    scale_target: tuple[float, float] | None = None  # seconds to a first token, and per token; None: scaler.py
    scale_window_s: float = 5.0
    scale_cooldown_s: float = 60.0  # after a change until the next
    decode_balance: str = "step"  # how a decode instance is chosen: by "step", "kv" or "batch" (instances/scores.py)

    @property
    def total_ranks(self) -> int:
        """Of all hosts; 1 where nothing says how many."""
        return (self.num_ranks or 1) * self.nnodes

    @property
    def uses_wire(self) -> bool:
        """Whether the launcher's ranks are a WireGroup: they span hosts, or are to do as if they did."""
        return self.nnodes > 1 or self.wire is not None

    @property
    def num_instances(self) -> int:
        """0: one group of ranks does all."""
        return self.num_prefill + self.num_decode

    @property
    def instance_plan(self) -> list[tuple[str, str, int]]:
        """Name, role and ranks of each instance of the start, in the order of their ranks."""
        plan = [(f"prefill-{i}", "prefill", self.prefill_ranks) for i in range(self.num_prefill)]
        return plan + [(f"decode-{i}", "decode", self.decode_ranks) for i in range(self.num_decode)]


class InstanceName(msgspec.Struct, frozen=True):
    """One of a server's instances: a group of ranks that computes by itself, and fails by itself."""

    name: str  # "prefill-0"; its successor has the same
    role: str  # of ROLES
    incarnation: str  # of these processes and no others
    num_ranks: int


ROLES = ("prefill", "decode")
# Each rank's host may have its own; the files are read where the frontend runs.
_FILES = ("chat_template", "api_key_file", "admin_key_file", "ssl_certfile", "ssl_keyfile")
_MEETING = ("node_rank", "dist_init_addr", "dist_timeout_s")
_OF_ONE_RANK = ("model_dir", "model_name", "model_aliases", "bind", *_FILES, *_MEETING)
SECRET_FLAGS = ("--api-key", "--admin-key")
_FLAG_OF = {
    "num_ranks": "-n",
    "enable_prefix_cache": "--no-prefix-cache",
    "request_log": "--no-request-log",
    "diagnose_log_bytes": "--diagnose-log-mb",
    "max_body_bytes": "--max-body-mb",
    "tiers": "--tier",
}


def common_flags(options: ServeOptions) -> dict[str, Any]:
    """By flag, the values that must be the same on all ranks."""
    given = dataclasses.asdict(options)
    given |= given.pop("engine")
    given["enable_prefix_cache"] ^= True
    given["request_log"] ^= True
    given["diagnose_log_bytes"] /= 2**20
    given["max_body_bytes"] /= 2**20
    flag_of = {name: "--" + name.removesuffix("_s").replace("_", "-") for name in given} | _FLAG_OF
    return {flag_of[name]: value for name, value in given.items() if name not in _OF_ONE_RANK}


class FrontendConfig(msgspec.Struct, frozen=True):
    """What the frontend reads from its standard input. It inherits the file descriptors."""

    options: ServeOptions
    num_ranks: int
    token: str  # the run's secret, which every rank's Hello must carry
    http_fd: int  # the listening HTTP socket
    listener_fd: int  # the listening socket for the other ranks
    # Rank 0's own connection, whose end of file says that rank 0 is gone. None: eprt's launcher has started the
    # frontend, and rank 0 connects like the others.
    rank0_fd: int | None = None
    # A pipe to eprt's launcher: a line SERVING once all ranks have loaded, a line that begins with LOST where they are
    # lost.
    notify_fd: int | None = None
    keys: ServerKeys = NO_KEYS
    board_fd: int | None = None  # of the HostBoard, which tells of ranks that were killed; only where ranks may be lost


SERVING = b"serving\n"
LOST = b"lost "
REFUSED = 2  # exit status of a rank that is not taken in


class WireJoin(msgspec.Struct, frozen=True):
    """How a rank finds the others where they share more than one host's memory (WireGroup)."""

    meeting: str  # HOST:PORT
    key: str  # of these ranks and this run
    listener_fd: int | None = None  # listens there; for rank 0


class RankConfig(msgspec.Struct, frozen=True):
    """What a rank of eprt's launcher reads from its standard input. It inherits the board's descriptor."""

    options: ServeOptions
    rank: int
    num_ranks: int
    board_fd: int | None  # of the HostBoard; None: the ranks meet over a wire
    endpoint: str  # where the frontend listens for ranks
    token: str  # see FrontendConfig
    launcher_pid: int
    joins: bool = False  # the others serve already: this process takes the place of a rank that was lost
    variables: dict[str, str] = {}  # of eprt, in the launcher's environment
    instance: InstanceName | None = None  # that the rank is part of; num_ranks and the board are its own
    first_rank: int = 0  # ranks of this server on this host that are in other instances, before this one's
    num_host_ranks: int = 0  # ranks of this server on this host, in all instances; 0: num_ranks
    gpus: tuple[str, ...] = ()  # UUID of each rank's GPU, of an instance on GPUs
    wire: WireJoin | None = None
    fingerprint: str = ""  # of the model that the others have loaded, where the rank joins; "": not known


def make_diagnose_dir(options: ServeOptions) -> None:
    """Called where rank 0 runs. OptionError where no log can be written; else that would show after one window."""
    if options.diagnose_dir is None:
        return
    path = Path(options.diagnose_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise OptionError(f"--diagnose-dir {path}: the log cannot be written there: {why}") from None
