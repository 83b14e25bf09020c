"""The command line of `eprt serve`: its flags, and the checks that turn them into ServeOptions.

Loads no torch, so a bad flag shows at once. Knows nothing of what the options do.
"""

import argparse
import os
from dataclasses import fields, replace
from pathlib import Path

import msgspec

from eprt import env
from eprt.bind import check_policy
from eprt.config import EngineConfig
from eprt.engine.sampling_defaults import read_sampling_defaults
from eprt.serve.engine_flags import add_bind_flag, add_engine_flags, add_model_flag, engine_options
from eprt.serve.flag_file import with_flags_of_file
from eprt.serve.host_flags import add_host_flags, check_hosts
from eprt.serve.http_flags import add_http_flags, add_number, check_http
from eprt.serve.instance_flags import add_instance_flags, check_instances
from eprt.serve.model_flags import check_flags_of_model
from eprt.serve.model_source import default_name, find_model_dir
from eprt.serve.openai.reasoning import REASONING_FORMAT_NAMES
from eprt.serve.openai.tools import TOOL_FORMAT_NAMES
from eprt.serve.options import MOST_RANKS, OptionError, ServeOptions
from eprt.serve.rank_fit import check_faults
from eprt.serve.scale_flags import add_scale_flags, check_scale
from eprt.serve.team_flags import check_teams
from eprt.serve.tier_flags import add_tier_flags, check_tiers

_INF = float("inf")
_MB = 1 << 20
_MOST_MB = float(1 << 40)  # more than any disk or memory: as much as wanted


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise OptionError(f"{message}; --help lists the flags")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="eprt serve",
        description="OpenAI-compatible server of a DeepSeek-style MoE model, its experts spread over ranks.",
        epilog="Examples: `eprt serve --model DIR` starts one rank per NUMA node; `eprt serve -n 2 --model DIR "
        "--device cuda` two GPUs; `mpirun -n 4 eprt serve --model DIR` takes the ranks of an mpirun of your own. "
        "SIGTERM and Ctrl-C let running requests finish. More: docs/operations.md.",
        allow_abbrev=False,
    )
    text = "print the memory that each rank would take and what is available, then exit: status 0 if it fits, else 1"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "YAML or TOML with names of flags and their values; flags on the command line win"
    parser.add_argument("--config", metavar="FILE", help=text)
    group = parser.add_argument_group("model")
    add_model_flag(group)
    text = "names by which clients may call the model; answers carry the first; default: the directory's name"
    group.add_argument("--served-model-name", dest="model_names", nargs="+", default=(), metavar="NAME", help=text)
    add_engine_flags(group, "dtype", "load_format", "num_hidden_layers", "quantization")
    text = "serve token ids only; no tokenizer is needed"
    group.add_argument("--skip-tokenizer-init", action="store_true", help=text)
    text = "Jinja template of chats, instead of the checkpoint's own"
    group.add_argument("--chat-template", metavar="FILE", help=text)
    text = "accept a request's own chat_template: a program, run in a sandbox without a time limit"
    group.add_argument("--trust-request-chat-template", action="store_true", help=text)
    _add_parsers(group)

    group = parser.add_argument_group("ranks")
    text = "ranks to start on this host; default: one per NUMA node, on GPUs one; not under an mpirun of your own"
    group.add_argument("-n", "--ranks", dest="num_ranks", type=int, metavar="N", help=text)
    add_engine_flags(group, "device")
    add_bind_flag(group)
    add_engine_flags(group, "prompt_ranks", "attention_tp", "attention_tp_form", "ep_payload")
    _add_losses(group)
    add_engine_flags(group, "expert_host_copies")
    add_host_flags(parser.add_argument_group("several hosts, without MPI"))
    group = parser.add_argument_group("instances: prefill and decode apart")
    add_instance_flags(group)
    add_scale_flags(group)

    _add_diagnosis(parser.add_argument_group("diagnosis"))
    _add_expert_load(parser.add_argument_group("expert load"))

    group = parser.add_argument_group("limits of each rank")
    add_engine_flags(group, "max_model_len", "kv_cache_gb", "memory_fraction", "kv_cache_dtype")
    add_engine_flags(group, "index_cache_dtype", "page_size")
    add_engine_flags(group, "max_num_seqs", "max_queue", "chunk_size")
    text = "compute each prompt from its beginning: never reuse the KV pages of an equal prefix"
    group.add_argument("--no-prefix-cache", dest="enable_prefix_cache", action="store_false", help=text)
    add_engine_flags(group, "seed")
    add_engine_flags(group, "generation_config")

    add_tier_flags(parser.add_argument_group("tiers of service"))
    add_engine_flags(parser.add_argument_group("drafts"), "num_speculative_tokens", "speculative_acceptance")
    group = parser.add_argument_group("steps")
    add_engine_flags(group, "low_latency_max_tokens", "overlap", "overlap_sms", "overlap_schedule")
    _add_graphs(group.add_mutually_exclusive_group())
    add_http_flags(parser.add_argument_group("HTTP"))
    return parser


def _add_parsers(group: argparse._ArgumentGroup) -> None:
    names = ", ".join(TOOL_FORMAT_NAMES)
    text = f"how the model writes tool calls: {names}; none: calls stay text; auto (default): as the chat template does"
    group.add_argument("--tool-call-parser", default=ServeOptions.tool_call_parser, metavar="NAME", help=text)
    names = ", ".join(REASONING_FORMAT_NAMES)
    text = f"how the model writes reasoning: {names}; none: reasoning stays text; auto (default): one of these where "
    text += "the chat template opens <think>, otherwise none"
    group.add_argument("--reasoning-parser", default=ServeOptions.reasoning_parser, metavar="NAME", help=text)


def _add_losses(group: argparse._ArgumentGroup) -> None:
    text = "ranks that may be lost while the others go on serving; default %(default)s: the first loss ends the server"
    default = ServeOptions.max_lost_ranks
    group.add_argument("--max-lost-ranks", type=int, default=default, metavar="F", help=text)
    text = "seconds that others wait for a rank before it is killed as lost; default: EPRT_TIMEOUT_S, but 1 s (or 10 "
    text += "usual steps) if the rank does nothing"
    group.add_argument("--hang-timeout", dest="hang_timeout_s", type=float, metavar="S", help=text)
    text = "seconds for which ranks that load may read nothing, compute nothing and wait on, before the one that holds "
    text += "them up is given up; default %(default)g"
    default = ServeOptions.load_timeout_s
    group.add_argument("--load-timeout", dest="load_timeout_s", type=float, default=default, metavar="S", help=text)
    text = "answer while experts that were lost with a rank are read; such answers say so. Default: requests wait"
    group.add_argument("--serve-without-experts", action="store_true", help=text)
    text = "replace a lost rank by a new process; if it keeps ending, again after 1, 2, 4 ... 60 s"
    group.add_argument("--restart-lost-ranks", action="store_true", help=text)


def _add_diagnosis(group: argparse._ArgumentGroup) -> None:
    text = "write the diagnosis log into this directory, for `eprt diagnose DIR`; default: no log"
    group.add_argument("--diagnose-dir", metavar="DIR", help=text)
    text = "seconds of one window of the diagnosis"
    add_number(group, "--diagnose-window", "diagnose_window_s", "S", text)
    text = "disk space of the diagnosis log; its oldest windows are deleted first"
    add_number(group, "--diagnose-log-mb", "diagnose_log_bytes", "MB", text, _MB)
    text = "make a real fault, such as slow-rank:3:2x or slow-link:2:5:3ms@10-40; may be repeated (docs/diagnosis.md)"
    group.add_argument("--inject", action="append", default=[], metavar="FAULT", help=text)


def _add_expert_load(group: argparse._ArgumentGroup) -> None:
    text = (
        "auto: move experts when that saves time; dry-run: only log what auto would do; off (default): move only what "
    )
    text += "is posted to /v1/eprt/rebalance"
    group.add_argument("--rebalance", default=ServeOptions.rebalance, metavar="MODE", help=text)
    text = "give less load to ranks that the diagnosis finds slow"
    group.add_argument("--rebalance-slow-ranks", action="store_true", help=text)
    text = "microseconds of a rank's network per token to another node and back; 0: plan for balance alone"
    add_number(group, "--us-per-crossing", "us_per_crossing", "US", text)
    add_engine_flags(group, "num_redundant_experts", "spare_experts", "replica_routing", "exact_combine")
    add_number(group, "--load-window", "load_window_s", "S", "seconds of one window of expert load")
    text = "seconds after which a round of a migration that has not ended is rolled back"
    add_number(group, "--migration-timeout", "migration_timeout_s", "S", text)


def _add_graphs(group: argparse._MutuallyExclusiveGroup) -> None:
    sizes = EngineConfig.graph_sizes
    text = (
        "on GPUs: batch sizes of decoding steps, drafts included, to record as CUDA graphs; those above "
        "--low-latency-max-tokens are left out; default 1 2 4 8 16 24 ... 256"
    )
    group.add_argument("--graph-sizes", type=int, nargs="+", default=sizes, metavar="N", help=text)
    text = "on GPUs: record no CUDA graphs; launch each kernel of a decoding step"
    group.add_argument("--no-graphs", dest="graph_sizes", action="store_const", const=(), help=text)


def parse_options(argv: list[str]) -> ServeOptions:
    """Raises OptionError with one line that names the flag, the value and the remedy."""
    parser = _parser()
    try:
        args = parser.parse_args(with_flags_of_file(parser, argv))
        check_policy(args.bind)
        _check_names(args)
        given_model, args.model_dir = args.model_dir, find_model_dir(args.model_dir)
        check_instances(args)
        check_hosts(args)
        engine = EngineConfig(**engine_options(args), hands_over=args.num_decode > 0)
    except ValueError as error:
        raise OptionError(str(error)) from None
    check_http(args)
    check_tiers(args)
    check_scale(args)
    _check_values(args)
    check_teams(args)
    _check_losses(args)
    _check_hang_timeout(args)
    _check_serve_without_experts(args)
    check_faults(args.inject, None if args.num_ranks is None else args.num_ranks * args.nnodes)
    if args.rebalance == "auto" and not args.spare_experts:
        raise OptionError("--rebalance auto needs --spare-experts of at least 1: experts need room to move")
    _check_model_dir(Path(args.model_dir), args)
    _check_chat_template(args.chat_template, args.skip_tokenizer_init)
    try:
        read_sampling_defaults(engine)
    except (ValueError, OSError) as error:
        raise OptionError(str(error)) from None
    given = {field.name: vars(args)[field.name] for field in fields(ServeOptions) if field.name in vars(args)}
    # Ranks that join are started in other directories.
    engine = replace(engine, model_dir=os.path.abspath(engine.model_dir))
    given["model_name"], *aliases = args.model_names or [default_name(given_model)]
    given["model_aliases"] = tuple(aliases)
    given["inject"], given["allowed_origins"] = tuple(args.inject), tuple(args.allowed_origins)
    for name in ("diagnose_log_bytes", "max_body_bytes"):
        given[name] = int(min(given[name], _MOST_MB) * _MB)
    return ServeOptions(engine=engine, **given)


def _check_names(args: argparse.Namespace) -> None:
    named = [("--served-model-name", name) for name in args.model_names]
    for flag, value in (("--model", args.model_dir), ("--diagnose-dir", args.diagnose_dir), *named):
        if value == "":  # an unset variable of a shell
            raise OptionError(f"{flag} is empty: give it a value or leave it out")
    for flag, value, names in (
        ("--tool-call-parser", args.tool_call_parser, TOOL_FORMAT_NAMES),
        ("--reasoning-parser", args.reasoning_parser, REASONING_FORMAT_NAMES),
    ):
        if value not in ("auto", "none", *names):
            raise OptionError(f"{flag} {value}: must be auto, none or one of {', '.join(names)}")


def _check_values(args: argparse.Namespace) -> None:
    for flag, value, ok, want in (
        ("--ranks", args.num_ranks, args.num_ranks is None or args.num_ranks >= 1, "at least 1"),
        ("--ranks", args.num_ranks, (args.num_ranks or 1) <= MOST_RANKS, f"at most {MOST_RANKS}"),
        ("--diagnose-window", args.diagnose_window_s, 0.5 <= args.diagnose_window_s <= 3600, "in 0.5..3600"),
        ("--diagnose-log-mb", args.diagnose_log_bytes, 1 <= args.diagnose_log_bytes < _INF, "finite and at least 1"),
        ("--rebalance", args.rebalance, args.rebalance in ("off", "auto", "dry-run"), "off, auto or dry-run"),
        ("--load-timeout", args.load_timeout_s, 2 <= args.load_timeout_s < _INF, "finite and at least 2"),
        ("--load-window", args.load_window_s, 0.1 <= args.load_window_s <= 86400, "in 0.1..86400"),
        ("--us-per-crossing", args.us_per_crossing, 0 <= args.us_per_crossing < _INF, "finite and at least 0"),
        ("--migration-timeout", args.migration_timeout_s, 0 < args.migration_timeout_s < _INF, "finite and above 0"),
    ):
        if not ok:
            raise OptionError(f"{flag} {value}: must be {want}")


def _check_losses(args: argparse.Namespace) -> None:
    num_lost, num_ranks = args.max_lost_ranks, args.num_ranks or 1
    if num_lost and args.num_ranks is None:
        raise OptionError(
            f"--max-lost-ranks {num_lost}: needs ranks that eprt starts on one host; give -n, and leave out mpirun"
        )
    if not 0 <= num_lost < num_ranks:
        raise OptionError(f"--max-lost-ranks {num_lost}: must be in 0..{num_ranks - 1} with -n {num_ranks}")
    if args.restart_lost_ranks and not num_lost and not args.num_decode:
        raise OptionError(
            "--restart-lost-ranks needs --max-lost-ranks of at least 1, or instances (--decode): else the first loss "
            "ends all"
        )


def _check_serve_without_experts(args: argparse.Namespace) -> None:
    if not args.serve_without_experts:
        return
    if not args.max_lost_ranks:
        raise OptionError(
            "--serve-without-experts needs --max-lost-ranks of at least 1: else the first lost rank ends the server"
        )
    if args.device != "cpu":
        raise OptionError(
            f"--serve-without-experts with --device {args.device}: is for ranks on CPUs; on GPUs give every expert a "
            "replica (--num-redundant-experts), or copies in host memory (--expert-host-copies node)"
        )


def _check_hang_timeout(args: argparse.Namespace) -> None:
    timeout_s, name = args.hang_timeout_s, "EPRT_TIMEOUT_S" if args.device == "cpu" else "EPRT_GPU_TIMEOUT_S"
    if timeout_s is None:
        return
    if not args.max_lost_ranks and not args.num_decode:
        raise OptionError(
            f"--hang-timeout {timeout_s:g}: needs --max-lost-ranks of at least 1, or instances (--decode): else nobody "
            "goes on without the rank"
        )
    most_s = env.get(name)
    if not 0.5 <= timeout_s <= most_s:
        raise OptionError(
            f"--hang-timeout {timeout_s:g}: must be in 0.5..{most_s:g}: ranks wait no longer for each other than "
            f"{name}={most_s:g} s"
        )


def _check_model_dir(model_dir: Path, args: argparse.Namespace) -> None:
    """What can be known of the directory without reading weights."""
    if not (model_dir / "config.json").is_file():
        raise OptionError(f"--model {model_dir}: has no config.json; it must be a Hugging Face model directory")
    try:
        config = msgspec.json.decode((model_dir / "config.json").read_bytes())
    except ValueError as error:
        raise OptionError(f"--model {model_dir}: config.json is not JSON: {error}") from None
    except RecursionError:
        raise OptionError(f"--model {model_dir}: config.json is nested too deeply; download it again") from None
    check_flags_of_model(args, model_dir)
    most = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if isinstance(most, int) and args.max_model_len is not None and args.max_model_len > most:
        raise OptionError(f"--max-model-len {args.max_model_len}: this model has positions up to {most}")
    if not args.skip_tokenizer_init and not (model_dir / "tokenizer.json").is_file():
        raise OptionError(
            f"--model {model_dir}: has no tokenizer.json; add it, or serve token ids only with --skip-tokenizer-init"
        )


def _check_chat_template(file: str | None, skip_tokenizer_init: bool) -> None:
    if file is None:
        return
    if skip_tokenizer_init:
        raise OptionError(
            f"--chat-template {file}: there are no chats with --skip-tokenizer-init; leave out one of them"
        )
    from eprt.serve.openai.templates import read_template_file

    try:
        read_template_file(file, {})
    except ValueError as error:
        raise OptionError(f"--chat-template {error}") from None
