"""DeepSeek V4 on GPU operators without a GPU: the whole model in Triton's interpreter, beside transformers in float32
and, with an fp8 cache, beside its own CPU operators.

    python -m tests.interpreted_v4

A prompt whole, in chunks and as decodes by rows; across ends of windows and of entries of both ratios, with an indexer
that chooses. Slow: a token takes a second.
"""

from tests import interpreted  # isort: skip  # before anything imports Triton

import functools
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from eprt import ops
from eprt.ops import cuda

_KIND = {"interpreted": True}


def _either(cpu: Callable, gpu: Callable) -> Callable:
    @functools.wraps(cpu)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (gpu if _KIND["interpreted"] else cpu)(*args, **kwargs)

    return call


for _name in dir(ops):  # before layers take their names
    if callable(getattr(cuda, _name, None)) and not isinstance(getattr(ops, _name), type):
        setattr(ops, _name, _either(getattr(ops, _name), getattr(cuda, _name)))

from eprt import EngineConfig, EPGroup  # noqa: E402
from eprt.models.loader import load_model  # noqa: E402
from tests import tiny_v4  # noqa: E402
from tests.paged_v4 import HybridRunner  # noqa: E402

TOLERANCE = 1e-3  # of log-probabilities


@contextmanager
def on_cpu():
    _KIND["interpreted"] = False
    try:
        yield
    finally:
        _KIND["interpreted"] = True


def main(num_tokens: int = 131, num_fp8: int = 24) -> None:
    assert interpreted.tl is not None
    model = tiny_v4.make_model(num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=1, index_topk=16)
    tokens = torch.randint(2, 128, (num_tokens,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
    with tempfile.TemporaryDirectory() as directory:
        tiny_v4.save(model, Path(directory) / "v4")
        ours = load_model(EngineConfig(f"{directory}/v4", chunk_size=1024), EPGroup.single())
    for what, chunk, num_decoded in (("decodes behind a prompt", 10**9, 9), ("chunks of 37", 37, 0)):
        check(what, HybridRunner(ours).log_probs(tokens, chunk, num_decoded=num_decoded), want)
    for index_cache in ("auto", "fp4"):
        formats = {"dtype": torch.uint8, "index_cache": index_cache}
        with on_cpu():
            want = HybridRunner(ours, **formats).log_probs(tokens[:num_fp8])
        got = HybridRunner(ours, **formats).log_probs(tokens[:num_fp8], num_decoded=9)
        check(f"fp8 entries, keys {index_cache}", got, want)


def check(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got - want).abs().max().item()
    print(f"{what}: error of log-probabilities {error:.1e}", flush=True)
    assert error < TOLERANCE, (what, error)


if __name__ == "__main__":
    main()
