"""Ask held-out questions and report how many were answered right, per skill.

    python -m examples.demo_model.evaluate --url http://127.0.0.1:8000      # a running server
    python -m examples.demo_model.evaluate --serve --ranks 4                # a server of its own
    python -m examples.demo_model.evaluate --hf                             # transformers, in this process

Exit status 0 from 95 % on, 1 below, 2 when no answers could be had. All questions are greedy (temperature 0).
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import chat
from .sample import Sample
from .score import THRESHOLD, format_table, held_out_questions, score

CHECKPOINT = Path(__file__).with_name("checkpoint")
MAX_NEW_TOKENS = 256
"""More than the longest taught answer has."""


def ask_server(url: str, samples: list[Sample], concurrency: int, timeout_s: float) -> list[str]:
    """Replies of an OpenAI-compatible server, in the order of `samples`."""
    models = _request(f"{url}/v1/models", None, timeout_s)
    name = models["data"][0]["id"]

    def ask(sample: Sample) -> str:
        body = {"model": name, "messages": sample.messages, "temperature": 0, "max_tokens": MAX_NEW_TOKENS}
        if sample.tools:
            body["tools"] = sample.tools
        answer = _request(f"{url}/v1/chat/completions", body, timeout_s)
        return reply_text(answer["choices"][0]["message"])

    with ThreadPoolExecutor(concurrency) as threads:
        return list(threads.map(ask, samples))


def _request(url: str, body: dict | None, timeout_s: float) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise ConnectionError(f"{url}: status {error.code}: {error.read().decode(errors='replace')[:500]}") from error


def print_drafts(url: str, timeout_s: float) -> None:
    """How many drafted tokens the server has accepted; nothing where it drafts none."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=timeout_s) as response:
        lines = [line.split() for line in response.read().decode().splitlines()]
    drafted, accepted = (
        sum(float(value) for name, value in (line for line in lines if len(line) == 2) if name.startswith(kind))
        for kind in ("eprt_drafted_tokens_total", "eprt_accepted_tokens_total")
    )
    if drafted:
        print(f"drafted {drafted:.0f} tokens, accepted {accepted:.0f} ({accepted / drafted:.1%})")


def reply_text(message: dict) -> str:
    """The reply as the model wrote it, put together again where the server took thinking or tool calls out."""
    text = message.get("content") or ""
    if message.get("reasoning_content"):
        text = f"<think>{message['reasoning_content'].strip()}</think>{text}"
    return text + "".join(chat.call_text(call["function"]) for call in message.get("tool_calls") or ())


def ask_transformers(directory: Path, samples: list[Sample], batch: int = 32) -> list[str]:
    """Replies of transformers' own implementation, in bf16 on this machine's processor."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].answer))
    replies = [""] * len(samples)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        prompts = [
            tokenizer.apply_chat_template(
                list(samples[i].messages), tools=list(samples[i].tools), tokenize=False, add_generation_prompt=True
            )
            for i in chosen
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for i, text in zip(chosen, texts, strict=True):
            replies[i] = text
        print(f"{start + len(chosen)}/{len(order)}", file=sys.stderr)
    return replies


def main() -> int:
    """Ask, print the table, optionally write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="root of a running server")
    parser.add_argument("--serve", action="store_true", help="start a server for the evaluation, on a free port")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the server that --serve starts")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that the server of --serve drafts in each step")
    parser.add_argument("--hf", action="store_true", help="evaluate with transformers instead of a server")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="directory for --hf and --serve")
    parser.add_argument("--num-prompts", type=int, default=440)
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for one reply")
    parser.add_argument("--seed", type=int, default=0, help="which held-out questions are drawn")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    samples = held_out_questions(args.num_prompts, args.seed)
    try:
        if args.hf:
            replies = ask_transformers(args.checkpoint, samples)
        elif args.serve:
            from eprt.serve.running import RunningServer

            drafts = str(args.drafts)
            with RunningServer(args.checkpoint, args.ranks, "--num-speculative-tokens", drafts) as server:
                replies = ask_server(server.url, samples, args.concurrency, args.timeout)
                print_drafts(server.url, args.timeout)
        else:
            replies = ask_server(args.url.rstrip("/"), samples, args.concurrency, args.timeout)
    except (OSError, RuntimeError) as error:
        print(f"no answers: {error}", file=sys.stderr)
        return 2
    result = score(samples, replies)
    print(format_table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["accuracy"] >= THRESHOLD else 1


if __name__ == "__main__":
    sys.exit(main())
