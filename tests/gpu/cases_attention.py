"""A whole model of DeepSeek-V3's width, whose decodes every attention kernel there is computes."""

import json
import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.shapes import DEEPSEEK_V3
from eprt import EngineConfig, EPGroup
from eprt.models.loader import load_model
from eprt.ops.cuda import attention
from tests.paged import PagedRunner, Request

LENGTHS, NUM_DECODED, PAGE_SIZE = (1, 63, 64, 65, 500, 1100), 6, 64


def decodes_say_what_prompts_say(group: EPGroup) -> None:
    """Dummy fp8 weights, 5 layers. The same tokens, once as prompts, once decoded one by one in a batch of unlike
    lengths, by each kernel; and beside it how far logits are off when the cache is that of other tokens."""
    with tempfile.TemporaryDirectory() as root:
        config = json.loads((DEEPSEEK_V3 / "config.json").read_text())
        (Path(root) / "config.json").write_text(json.dumps({**config, "n_routed_experts": 16}))
        options = {"device": "cuda", "load_format": "dummy", "num_hidden_layers": 5, "dtype": "bfloat16"}
        options["chunk_size"] = 2 * max(LENGTHS)  # whole texts are prompts of one step
        model = load_model(EngineConfig(root, **options), group)
    rng = torch.Generator().manual_seed(3)
    texts = [torch.randint(2, 129000, (n + NUM_DECODED,), generator=rng).tolist() for n in LENGTHS]
    others = [torch.randint(2, 129000, (n,), generator=rng).tolist() for n in LENGTHS]
    with torch.inference_mode():
        want = torch.stack([_runner(model).prefill(Request(text))[-NUM_DECODED:] for text in texts])
        found = {}
        for name in attention.installed():
            with patch.dict(os.environ, EPRT_GPU_ATTENTION=name):
                found[name] = _errors(_decode(model, texts, texts), want)
        wrong = _errors(_decode(model, texts, others), want)[1:]  # the first text has but a token in the cache
    for name, errors in {**found, "other tokens": wrong}.items():
        print(f"{name}: error of the logits {errors.median():.4f}, at most {errors.max():.4f}")
    for name, errors in found.items():
        # 0.15 either way on an H200: e4m3 activations, and gates of random weights that choose other experts.
        assert errors.median() < 0.25 and errors.median() < 0.2 * wrong.median(), (name, errors)
    model.close()


def _runner(model) -> PagedRunner:
    """What pages hold beside the tokens written is finite, as in the engine."""
    runner = PagedRunner(model, num_pages=64, page_size=PAGE_SIZE)
    for cache in runner.cache_L:
        cache.latents.normal_()
    return runner


def _decode(model, texts: list[list[int]], cached: list[list[int]]) -> Tensor:
    """Logits [texts, NUM_DECODED, V] of the last tokens, behind a cache of the tokens of cached."""
    runner = _runner(model)
    requests = [Request(before[: len(text) - NUM_DECODED]) for text, before in zip(texts, cached)]
    for request, text in zip(requests, texts):
        runner.prefill(request)
        request.tokens = text
    steps = [torch.cat(runner.forward([(request, 1) for request in requests])) for _ in range(NUM_DECODED)]
    return torch.stack(steps, dim=1)


def _errors(got: Tensor, want: Tensor) -> Tensor:
    """Of each token's logits, relative to their spread."""
    spread = (want - want.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return (got - want).norm(dim=-1) / spread
