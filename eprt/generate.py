"""`eprt generate`: completions on standard output, on one rank or under mpirun.

eprt generate --model examples/demo_model/checkpoint --prompt "12 + 30 ="
mpirun -n 4 eprt generate --model DIR --file prompts.txt --json

Knows nothing of HTTP; flags of the engine and chat templates are the server's.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from eprt import env
from eprt.bind import bind, check_policy
from eprt.config import EngineConfig
from eprt.engine.outputs import CompletionOutput, RequestOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.serve.engine_flags import add_bind_flag, add_engine_flags, add_model_flag, engine_options
from eprt.serve.errors import report_mistake
from eprt.serve.model_source import find_model_dir


def build_parser() -> argparse.ArgumentParser:
    text = "Completions of prompts. Under mpirun the ranks share the experts and the work."
    parser = argparse.ArgumentParser(prog="eprt generate", description=text)
    add_model_flag(parser)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    add("--file", metavar="FILE", help="one prompt per line; - reads standard input (one rank only)")
    add("--chat", action="store_true", help="put each prompt into the checkpoint's chat template")
    add("--max-tokens", type=int, default=128, metavar="N", help="most tokens of a completion, default %(default)s")
    add("--temperature", type=float, default=0.0, metavar="T", help="0..2, default 0: the likeliest token")
    text = "draw from the likeliest tokens that make up P of the probability, default 1: all"
    add("--top-p", type=float, default=1.0, metavar="P", help=text)
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens, default 0: all")
    text = "random seed of the sampling; default: drawn by the engine, alike in every run"
    add("--seed", dest="sampling_seed", type=int, metavar="N", help=text)
    add("--stop", action="append", default=[], metavar="TEXT", help="text that ends a completion; may be repeated")
    add("-n", type=int, default=1, metavar="N", help="completions per prompt, default %(default)s")
    add("--json", action="store_true", help="one JSON object per completion instead of text")
    add_engine_flags(parser, "dtype", "quantization", "device", "overlap", "num_speculative_tokens", "prompt_ranks")
    add_engine_flags(parser, "attention_tp", "attention_tp_form")
    add_engine_flags(parser, "kv_cache_gb", "memory_fraction", "max_model_len")
    add_bind_flag(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 when the arguments or the checkpoint cannot be used."""
    arguments = build_parser().parse_args(argv)
    try:
        env.check()
        return _generate(arguments)
    except BrokenPipeError:  # `eprt` knows of readers that have seen enough
        raise
    except (ValueError, OSError, ImportError, MemoryError) as error:
        report_mistake("eprt generate", error, env.launched_rank())
        if mpi := sys.modules.get("mpi4py.MPI"):
            mpi.COMM_WORLD.Abort(2)  # the other ranks would wait for this one in the next collective call
        return 2


def _generate(arguments: argparse.Namespace) -> int:
    texts = _prompts(arguments)
    given = {name: vars(arguments)[name] for name in ("max_tokens", "temperature", "top_p", "top_k", "n")}
    params = SamplingParams(**given, seed=arguments.sampling_seed, stop=tuple(arguments.stop))
    arguments.model_dir = find_model_dir(arguments.model_dir)
    options = engine_options(arguments)
    check_policy(arguments.bind)
    EngineConfig(**options)  # wrong flags show before torch is loaded

    from eprt.engine.llm import LLM
    from eprt.ep.group.group import EPGroup

    group = EPGroup.single()
    if env.started_by_mpirun():
        from eprt.ep.group.mpi_group import end_job_on_errors

        group = EPGroup.from_mpi()
        end_job_on_errors()  # those that main() does not expect
    bind(arguments.bind, group.allgather)
    with LLM(group=group, **options) as llm:
        prompts = [_in_chat_template(llm, text) for text in texts] if arguments.chat else texts
        results = llm.generate(prompts, params)
    group.close()
    if group.rank == 0:
        for text, result in zip(texts, results):
            for output in result.outputs:
                print(_json(text, result, output) if arguments.json else output.text, flush=True)
    return 0


def _prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompt)
    if arguments.file == "-":
        if env.started_by_mpirun():
            raise ValueError(
                "--file -: only rank 0 of an MPI job has standard input; give a file that all ranks can read"
            )
        prompts += sys.stdin.read().splitlines()
    elif arguments.file:
        try:
            prompts += Path(arguments.file).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"--file {arguments.file}: not text in UTF-8: {error}") from None
        except OSError as error:
            raise ValueError(f"--file {arguments.file}: cannot be read: {error.strerror or error}") from None
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT or --file FILE")
    return prompts


def _in_chat_template(llm, prompt: str) -> list[int]:
    """Token ids of the prompt as a user's message. The template writes BOS, so the tokenizer must not."""
    from eprt.serve.openai.protocol import Message
    from eprt.serve.openai.templates import find_template

    if llm.tokenizer is None:
        raise ValueError(f"--chat: {llm.engine.config.model_dir} has no tokenizer.json, so no text can be encoded")
    template = find_template(llm.engine.config.model_dir, llm.tokenizer)
    if template is None:
        raise ValueError(f"--chat: {llm.engine.config.model_dir} has no chat template")
    text = template.render([Message(role="user", content=prompt)])
    return llm.tokenizer.encode(text, add_special_tokens=False)


def _json(prompt: str, result: RequestOutput, output: CompletionOutput) -> str:
    fields = {name: getattr(output, name) for name in ("index", "text", "token_ids", "finish_reason", "error")}
    return json.dumps({"prompt": prompt, "prompt_tokens": len(result.prompt_token_ids), **fields})


if __name__ == "__main__":
    from eprt import cli

    sys.exit(cli.main(["generate", *sys.argv[1:]]))
