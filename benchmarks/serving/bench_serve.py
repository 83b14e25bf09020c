"""Serving over HTTP beside transformers.generate, on the same checkpoint and cores.

8 requests at once, greedy, a fixed number of tokens each. The candidates take turns, several rounds in one run:

    eprt           8 concurrent HTTP requests to `python -m eprt.serve -n N` (idle ranks sleep while others are timed)
    one by one     transformers.generate for each request in turn: what a plain server around generate does
    batched        one transformers.generate for all 8, which must start and end together

transformers runs in bf16 (the checkpoint's type) on as many threads as the machine has cores. Tokens per second count
generated tokens of all requests; ttft is the time to the first streamed token.
"""

import asyncio
import os
import statistics
import time

import httpx
import torch

from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import Timing
from eprt.serve.running import RunningServer

NUM_RANKS = 0
NEEDS = "transformers, which make bench installs"

CONCURRENT, TOKENS, ROUNDS = 8, 32, 3
QUESTIONS = [f"Count from {i} to {i + 60}." for i in range(3, 3 + CONCURRENT)]


class ServerClient:
    """Asks a running server all questions at once over HTTP."""

    def __init__(self, server: RunningServer):
        self._server = server
        self.ttft_s: list[float] = []

    def __call__(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        async with httpx.AsyncClient(base_url=self._server.url, timeout=300) as client:
            await asyncio.gather(*(self._one(client, question) for question in QUESTIONS))

    async def _one(self, client: httpx.AsyncClient, question: str) -> None:
        body = {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start, last = time.perf_counter(), ""
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line and not last:
                    self.ttft_s.append(time.perf_counter() - start)
                last = line if '"usage"' in line else last or line
        assert f'"completion_tokens":{TOKENS}' in last, last


class TransformersModel:
    """The checkpoint in transformers."""

    def __init__(self):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.bfloat16).eval()

    def _generate(self, questions: list[str]) -> None:
        chats = [[{"role": "user", "content": question}] for question in questions]
        inputs = self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        with torch.inference_mode():
            ids = self._model.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        assert ids.shape[1] == inputs["input_ids"].shape[1] + TOKENS

    def one_by_one(self) -> None:
        for question in QUESTIONS:
            self._generate([question])

    def batched(self) -> None:
        self._generate(QUESTIONS)


def main() -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    config = {"concurrent": CONCURRENT, "tokens": TOKENS, "rounds": ROUNDS, "dtype": "bf16"}
    report = BenchmarkReport("serve", {**config, "model": DEMO_MODEL.parent.name})
    theirs = TransformersModel()
    for num_ranks in (1, 4):
        with RunningServer(DEMO_MODEL, num_ranks, "--bind", "none") as server:
            ours = ServerClient(server)
            seconds: dict[str, list[float]] = {"eprt": [], "one_by_one": [], "batched": []}
            calls = {"eprt": ours, "one_by_one": theirs.one_by_one, "batched": theirs.batched}
            for call in calls.values():
                call()  # warm
            ours.ttft_s.clear()
            for _ in range(ROUNDS):
                for name, call in calls.items():
                    start = time.perf_counter()
                    call()
                    seconds[name].append(time.perf_counter() - start)
        times = {name: Timing.from_samples(values) for name, values in seconds.items()}
        tokens = CONCURRENT * TOKENS
        report.add_row(
            ranks=num_ranks,
            **{f"{name}_tok_s": tokens / timing.median_s for name, timing in times.items()},
            x_one_by_one=times["one_by_one"].median_s / times["eprt"].median_s,
            x_batched=times["batched"].median_s / times["eprt"].median_s,
            ttft_ms=statistics.median(ours.ttft_s) * 1e3,
            **times["eprt"].columns("eprt", "ms"),
            **times["one_by_one"].columns("one_by_one", "ms"),
            **times["batched"].columns("batched", "ms"),
        )
    report.finish()


if __name__ == "__main__":
    main()
