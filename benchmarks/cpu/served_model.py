"""A server of ours with dummy weights, and how long it takes for prompts and for decoding steps, over HTTP.

Knows the server's flags and its API, and no peer.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from eprt.serve.running import RunningServer

_FIRST_ID = 3
# Flags and changes of config.json that give the weights a format.
FORMATS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "bf16": ((), {}),
    "int8": (("--quantization", "int8"), {}),
    "fp8": ((), {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}),
}


@contextmanager
def shape_directory(config: Mapping[str, Any], weight_format: str) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """A directory with a config.json of that shape for weights of a format, and the flags that go with it."""
    flags, changes = FORMATS[weight_format]
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**plain, **changes}))
        yield Path(folder), flags


class ServedModel:
    """A running server, and the requests that time it."""

    def __init__(self, server: RunningServer, vocab_size: int):
        self._server, self._vocab_size, self._rng = server, vocab_size, np.random.default_rng(0)

    def prompt_seconds(self, tokens: int) -> float:
        """Until the first token of an answer."""
        return asyncio.run(self._all(1, tokens, 1))[0]

    def decode_seconds(self, streams: int, prompt: int, tokens: int) -> float:
        """Of a step that adds a token to each of so many streams, after prompts of so many tokens."""
        return asyncio.run(self._all(streams, prompt, tokens))[1]

    async def _all(self, streams: int, prompt: int, tokens: int) -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=self._server.url, timeout=600) as client:
            start = time.perf_counter()
            times = await asyncio.gather(*(self._one(client, prompt, tokens) for _ in range(streams)))
        return max(at[0] for at in times) - start, _step_seconds(times) if tokens > 1 else 0.0

    async def _one(self, client: httpx.AsyncClient, prompt: int, tokens: int) -> list[float]:
        """When each token came."""
        body = {
            "model": self._server.model,
            "prompt": self._rng.integers(_FIRST_ID, self._vocab_size, prompt).tolist(),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        at: list[float] = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    at += [time.perf_counter()] * sum(len(c.get("token_ids") or ()) for c in event.get("choices", ()))
        assert len(at) == tokens, f"{len(at)} tokens came of {tokens}"
        return at


def _step_seconds(times: Sequence[Sequence[float]]) -> float:
    """While all streams ran: from the last first token to the first last token."""
    begin, end = max(at[0] for at in times), min(at[-1] for at in times)
    steps = [sum(begin < moment <= end for moment in at) for at in times]
    return (end - begin) * len(times) / max(1, sum(steps))


@contextmanager
def served(
    config: Mapping[str, Any], weight_format: str, num_ranks: int, layers: int, max_tokens: int, *flags: str
) -> Iterator[ServedModel]:
    """The first `layers` layers of a model of this shape, dummy weights in the format, on so many ranks."""
    with shape_directory(config, weight_format) as (folder, format_flags):
        shape = ("--load-format", "dummy", "--num-hidden-layers", str(layers), "--dtype", "bfloat16")
        limits = ("--max-model-len", str(max_tokens), "--kv-cache-gb", "1", "--skip-tokenizer-init")
        quiet = ("--no-request-log", "--no-prefix-cache")
        arguments = (*shape, *limits, *quiet, *format_flags, *flags)
        with RunningServer(folder, num_ranks, *arguments, timeout_s=300) as server:
            yield ServedModel(server, config["vocab_size"])
