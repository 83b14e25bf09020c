"""Command line of `python -m eprt.serve` -> ServeOptions, checked without loading torch: a bad flag shows at once.

FrontendConfig carries them on to the frontend's process.
"""

import argparse
import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from eprt.config import EngineConfig, ParallelConfig

_INF = float("inf")


class OptionError(ValueError):
    """A flag that cannot be served; str() is the one line to print."""


@dataclass(frozen=True)
class ServeOptions:
    """engine: limits of one rank. model_name: what clients call the model. num_ranks: None, or -n of the launcher.

    drain_timeout_s: how long a stopping server waits for running requests. lost_grace_s: how long /health tells of a
    lost rank before the server exits. max_body_bytes: larger request bodies are refused. body_timeout_s: so are those
    that have not come whole by then.
    diagnose_dir: where the diagnosis log goes, None for nowhere. diagnose_window_s: length of its windows.
    diagnose_log_bytes: most that the log's files take together.
    inject: faults on purpose (eprt.diagnostics.inject).
    rebalance: "off" (only what is posted), "auto" or "dry-run". rebalance_slow_ranks: plans give ranks that the
    diagnosis finds slow less load. us_per_crossing: see TriggerConfig. load_window_s: how long a window of expert load
    is. migration_timeout_s: deadline of each round of a migration.
    """

    engine: EngineConfig
    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    bind: str = "core"
    num_ranks: int | None = None
    skip_tokenizer_init: bool = False
    api_key: str | None = None
    drain_timeout_s: float = 30.0
    lost_grace_s: float = 3.0
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 60.0
    diagnose_dir: str | None = None
    diagnose_window_s: float = 10.0
    diagnose_log_bytes: int = 1 << 30
    inject: tuple[str, ...] = ()
    rebalance: str = "off"
    rebalance_slow_ranks: bool = False
    us_per_crossing: float = 0.4
    load_window_s: float = 5.0
    migration_timeout_s: float = 120.0


# Of these each rank's host has its own.
_OWN = ("model_dir", "model_name", "bind")
_FLAG_OF = {
    "num_ranks": "-n",
    "enable_prefix_cache": "--no-prefix-cache",
    "diagnose_log_bytes": "--diagnose-log-mb",
    "max_body_bytes": "--max-body-mb",
}


def of_all_ranks(options: ServeOptions) -> dict[str, Any]:
    """By flag, what must be the same on all ranks."""
    given = dataclasses.asdict(options)
    given |= given.pop("engine")
    given["enable_prefix_cache"] ^= True
    given["diagnose_log_bytes"] /= 2**20
    given["max_body_bytes"] /= 2**20
    flag_of = {name: "--" + name.removesuffix("_s").replace("_", "-") for name in given} | _FLAG_OF
    return {flag_of[name]: value for name, value in given.items() if name not in _OWN}


class FrontendConfig(msgspec.Struct, frozen=True):
    """What rank 0 writes to the frontend's standard input. The fds are inherited: the listening HTTP socket, the
    listener for ranks, and rank 0's own connection, whose end tells that rank 0 is gone."""

    options: ServeOptions
    num_ranks: int
    token: str
    http_fd: int
    listener_fd: int
    rank0_fd: int


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise OptionError(f"{message}; --help lists the flags")


# One option a line or two: as a table reads.
# fmt: off


def _parser() -> argparse.ArgumentParser:
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    parser = _Parser(
        prog="eprt serve",
        description="OpenAI-compatible server of a DeepSeek-style MoE model over MPI ranks.",
        epilog="Start it as `eprt serve -n 4 --model DIR` (drains on SIGTERM and Ctrl-C) or under an mpirun of your "
        "own (`mpirun -n 4 eprt serve --model DIR`). `python -m eprt.serve` is the same program; docs/operations.md "
        "has the details.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("model").add_argument
    add("--model", required=True, metavar="DIR",
        help="Hugging Face directory: config.json, safetensors, tokenizer.json")
    add("--served-model-name", metavar="NAME", help="what clients call it; default: the directory's name")
    add("--dtype", default=defaults["dtype"], help="auto (the checkpoint's, default), float32 or bfloat16")
    add("--load-format", default=defaults["load_format"], metavar="HOW",
        help="auto (the files, default) or dummy (random weights)")
    add("--num-hidden-layers", type=int, metavar="K", help="fewer layers than the model's, with dummy weights only")
    add("--quantization", default=defaults["quantization"], metavar="HOW",
        help="int8: quantise the experts' weights at load, on CPUs; default: as they are")
    add("--skip-tokenizer-init", action="store_true", help="serve token ids only; no tokenizer is needed")

    add = parser.add_argument_group("ranks").add_argument
    add("-n", "--ranks", type=int, metavar="N", help="ranks to start with mpirun; an mpirun of your own says it itself")
    add("--device", default=defaults["device"], help="cpu, cuda (a GPU for each rank) or auto; default %(default)s")
    add("--bind", default=ParallelConfig.bind, metavar="HOW",
        help="pin each rank to its share of the machine: core (default), numa or none")
    add("--ep-payload", default=defaults["ep_payload"], metavar="WHAT",
        help="what dispatch sends: same (the dtype, default) or fp8")

    add = parser.add_argument_group("diagnosis").add_argument
    add("--diagnose-dir", metavar="DIR", help="write the diagnosis log there, for `eprt diagnose DIR`")
    add("--diagnose-window", type=float, default=ServeOptions.diagnose_window_s, metavar="S",
        help="seconds of one window of the diagnosis, default %(default)g")
    add("--diagnose-log-mb", type=float, default=ServeOptions.diagnose_log_bytes / 2**20, metavar="MB",
        help="most the diagnosis log takes on disk, oldest windows go first, default %(default)g")
    add("--inject", action="append", default=[], metavar="FAULT",
        help="a fault on purpose, as slow-rank:3:2x or slow-link:2:5:3ms@10-40; may be repeated (docs/diagnosis.md)")
    _add_expert_load(parser, defaults)
    _add_limits(parser, defaults)
    _add_steps(parser, defaults)
    _add_http(parser)
    return parser


def _add_expert_load(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    add = parser.add_argument_group("expert load").add_argument
    add("--rebalance", default=ServeOptions.rebalance, metavar="MODE",
        help="auto: move experts as their load asks; dry-run: only say so; off: as posted (default)")
    add("--rebalance-slow-ranks", action="store_true", help="plans give ranks that the diagnosis finds slow less load")
    add("--us-per-crossing", type=float, default=ServeOptions.us_per_crossing, metavar="US",
        help="us that a rank's network takes for one token to another node and back, default %(default)g; 0: plans "
        "for balance alone")
    add("--num-redundant-experts", type=int, default=defaults["num_redundant_experts"], metavar="N",
        help="slots of all ranks for replicas, in each MoE layer, default %(default)s")
    add("--spare-experts", type=int, default=defaults["spare_experts"], metavar="N",
        help="experts a rank has memory for while they move, default %(default)s; 0: they cannot")
    add("--replica-routing", default=defaults["replica_routing"], metavar="HOW",
        help="which replica a token takes: weights (the plan's, default), local (nearest first, in the same "
        "proportion), batch or batch-lp (split anew in each step, evenly and then locally)")
    add("--exact-combine", action="store_true",
        help="GPUs: answers do not depend, in any bit, on where experts live; more bytes between GPUs")
    add("--load-window", type=float, default=ServeOptions.load_window_s, metavar="S",
        help="seconds of one window of expert load, default %(default)g")
    add("--migration-timeout", type=float, default=ServeOptions.migration_timeout_s, metavar="S",
        help="seconds until a round of a migration is rolled back, default %(default)g")


def _add_limits(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    add = parser.add_argument_group("limits of each rank").add_argument
    add("--max-model-len", type=int, metavar="N",
        help="most tokens of prompt and completion together; default: the model's")
    add("--kv-cache-gb", type=float, default=defaults["kv_cache_gb"], metavar="GB",
        help="memory of the KV cache (2**30 bytes), default %(default)g")
    add("--kv-cache-dtype", choices=("auto", "bf16", "fp8"), default=defaults["kv_cache_dtype"],
        help="auto (default): the model's; fp8 holds 1.75 times the tokens of bf16")
    add("--page-size", type=int, metavar="N", help="tokens per KV page, default 16, with --device cuda or auto 64")
    add("--max-num-seqs", type=int, default=defaults["max_num_seqs"], metavar="N",
        help="running sequences, default %(default)s")
    add("--max-queue", type=int, default=defaults["max_queue"], metavar="N",
        help="waiting sequences, more get 429, default %(default)s")
    add("--chunk-size", type=int, default=defaults["chunk_size"], metavar="N",
        help="most tokens of one step, default %(default)s")
    add("--no-prefix-cache", action="store_true", help="never reuse the KV pages of an equal prompt beginning")
    add("--seed", type=int, default=defaults["seed"], metavar="N",
        help="of requests that bring no seed, default %(default)s")


def _add_steps(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    add = parser.add_argument_group("drafts").add_argument
    add("--num-speculative-tokens", type=int, default=defaults["num_speculative_tokens"], metavar="K",
        help="tokens the checkpoint's MTP layer guesses per request and step, default %(default)s")
    add("--speculative-acceptance", default=defaults["speculative_acceptance"], metavar="HOW",
        help="exact: guesses never change an answer; rejection: with a temperature more of them hold, answers follow "
        "the same distribution; default %(default)s")

    group = parser.add_argument_group("steps")
    add = group.add_argument
    add("--low-latency-max-tokens", type=int, default=defaults["low_latency_max_tokens"], metavar="N",
        help="steps of no more tokens on any rank use the low-latency exchange, default %(default)s")
    add("--overlap", default=defaults["overlap"], metavar="HOW",
        help="what is computed while tokens travel: none, tbo (two half batches in turn), sbo (decodes: the shared "
        "expert and the experts' second product), auto (default; docs/overlap.md)")
    add("--overlap-sms", type=int, metavar="N",
        help="sbo: SMs of a GPU that send outputs beside the experts; default: as many as pay")
    add("--overlap-schedule", action=argparse.BooleanOptionalAction,
        help="prepare each step while the one before computes; default: on GPUs, without drafts")
    add = group.add_mutually_exclusive_group().add_argument
    add("--graph-sizes", type=int, nargs="+", default=list(defaults["graph_sizes"]), metavar="N",
        help="on GPUs: numbers of decodes, drafts included, to record steps for as CUDA graphs, as far as "
        "--low-latency-max-tokens; default 1 2 4 8 16 24 ... 256")
    add("--no-graphs", action="store_true", help="on GPUs: launch every kernel of a decoding step anew")


def _add_http(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("HTTP").add_argument
    add("--host", default=ServeOptions.host, help="address to listen on, default %(default)s")
    add("--port", type=int, default=ServeOptions.port, help="default %(default)s; 0 picks a free one")
    add("--api-key", metavar="KEY", help="require `Authorization: Bearer KEY` on /v1 paths")
    add("--max-body-mb", type=float, default=ServeOptions.max_body_bytes / 2**20, metavar="MB",
        help="largest request body (2**20 bytes), default %(default)g")
    add("--body-timeout", type=float, default=ServeOptions.body_timeout_s, metavar="S",
        help="seconds a request body may take to arrive, default %(default)g")
    add("--drain-timeout", type=float, default=ServeOptions.drain_timeout_s, metavar="S",
        help="seconds a stopping server lets running requests finish, default %(default)g")


# fmt: on


def parse(argv: list[str]) -> ServeOptions:
    """Raises OptionError with one line naming the flag, the value and the remedy."""
    args = _parser().parse_args(argv)
    try:
        ParallelConfig(bind=args.bind)
        engine = _engine_config(args)
    except ValueError as error:
        raise OptionError(str(error)) from None
    for flag in ("--model", "--served-model-name", "--diagnose-dir", "--host"):  # a shell's variable that is not set
        if getattr(args, flag[2:].replace("-", "_")) == "":
            raise OptionError(f"{flag} is empty: give it a value or leave it out")
    for flag, ok, want in (
        ("--ranks", args.ranks is None or args.ranks >= 1, "at least 1"),
        ("--port", 0 <= args.port <= 65535, "in 0..65535"),
        ("--drain-timeout", 0 <= args.drain_timeout < _INF, "finite and at least 0"),
        ("--body-timeout", 0 < args.body_timeout < _INF, "finite and above 0"),
        ("--diagnose-window", 0.5 <= args.diagnose_window <= 3600, "in 0.5..3600"),
        ("--diagnose-log-mb", 1 <= args.diagnose_log_mb < _INF, "finite and at least 1"),
        ("--rebalance", args.rebalance in ("off", "auto", "dry-run"), "off, auto or dry-run"),
        ("--load-window", 0.1 <= args.load_window <= 86400, "in 0.1..86400"),
        ("--us-per-crossing", 0 <= args.us_per_crossing < _INF, "finite and at least 0"),
        ("--migration-timeout", 0 < args.migration_timeout < _INF, "finite and above 0"),
        ("--max-body-mb", 0 < args.max_body_mb < _INF, "finite and above 0"),
        ("--api-key", args.api_key is None or (args.api_key.isascii() and args.api_key.isprintable() and args.api_key),
         "printable ASCII, not empty"),
    ):  # fmt: skip
        if not ok:
            value = getattr(args, flag[2:].replace("-", "_"))
            raise OptionError(f"{flag} {value}: must be {want}")
    _check_faults(args.inject, args.ranks)
    if args.rebalance == "auto" and not args.spare_experts:
        raise OptionError("--rebalance auto needs --spare-experts of at least 1: experts need room to move")
    _check_model_dir(Path(args.model), args.skip_tokenizer_init)
    return ServeOptions(
        engine=engine,
        model_name=args.served_model_name or Path(args.model).resolve().name,
        host=args.host,
        port=args.port,
        bind=args.bind,
        num_ranks=args.ranks,
        skip_tokenizer_init=args.skip_tokenizer_init,
        api_key=args.api_key,
        drain_timeout_s=args.drain_timeout,
        diagnose_dir=args.diagnose_dir,
        diagnose_window_s=args.diagnose_window,
        diagnose_log_bytes=int(args.diagnose_log_mb * 2**20),
        inject=tuple(args.inject),
        rebalance=args.rebalance,
        rebalance_slow_ranks=args.rebalance_slow_ranks,
        us_per_crossing=args.us_per_crossing,
        load_window_s=args.load_window,
        migration_timeout_s=args.migration_timeout,
        max_body_bytes=int(args.max_body_mb * 2**20),
        body_timeout_s=args.body_timeout,
    )


def make_diagnose_dir(options: ServeOptions) -> None:
    """Where rank 0 runs. OptionError where no log can be written: it would be found out after the first window."""
    if options.diagnose_dir is None:
        return
    path = Path(options.diagnose_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise OptionError(f"--diagnose-dir {path}: the log cannot be written there: {why}") from None


def _check_faults(faults: list[str], num_ranks: int | None) -> None:
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


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model_dir=args.model,
        dtype=args.dtype,
        device=args.device,
        quantization=args.quantization,
        load_format=args.load_format,
        num_hidden_layers=args.num_hidden_layers,
        low_latency_max_tokens=args.low_latency_max_tokens,
        overlap_schedule=args.overlap_schedule,
        graph_sizes=() if args.no_graphs else tuple(args.graph_sizes),
        overlap=args.overlap,
        overlap_sms=args.overlap_sms,
        max_model_len=args.max_model_len,
        kv_cache_gb=args.kv_cache_gb,
        kv_cache_dtype=args.kv_cache_dtype,
        page_size=args.page_size,
        num_speculative_tokens=args.num_speculative_tokens,
        speculative_acceptance=args.speculative_acceptance,
        chunk_size=args.chunk_size,
        max_num_seqs=args.max_num_seqs,
        max_queue=args.max_queue,
        enable_prefix_cache=not args.no_prefix_cache,
        ep_payload=args.ep_payload,
        num_redundant_experts=args.num_redundant_experts,
        spare_experts=args.spare_experts,
        replica_routing=args.replica_routing,
        exact_combine=args.exact_combine,
        seed=args.seed,
    )


def _check_model_dir(model_dir: Path, skip_tokenizer_init: bool) -> None:
    """What can be known of the directory without reading weights."""
    if not model_dir.is_dir():
        raise OptionError(f"--model {model_dir}: no such directory")
    if not (model_dir / "config.json").is_file():
        raise OptionError(f"--model {model_dir}: has no config.json; it must be a Hugging Face model directory")
    try:
        msgspec.json.decode((model_dir / "config.json").read_bytes())
    except ValueError as error:
        raise OptionError(f"--model {model_dir}: config.json is not JSON: {error}") from None
    if not skip_tokenizer_init and not (model_dir / "tokenizer.json").is_file():
        raise OptionError(
            f"--model {model_dir}: has no tokenizer.json; add it, or serve token ids only with --skip-tokenizer-init"
        )
