"""Attention of expanded prompts on Hopper against float64: the kernel, and what surrounds it."""

import torch

from eprt.ops.attention import PagedContext
from eprt.ops.cuda import expanded_triton
from eprt.ops.cuda.mla_expanded import attend_prompts, kernel
from tests.gpu.draw import Draw, near
from tests.prompts import Prompts

TOLERANCE = 4e-3
CASES: tuple[tuple[list[int], list[int], int, float], ...] = (  # new tokens, lengths, heads, sharpness
    ([1], [1], 1, 1.0),
    ([128], [128], 1, 1.0),
    ([129], [129], 16, 1.0),
    ([300], [5000], 2, 8.0),
    ([5, 0, 700, 129, 1, 260], [1005, 3, 700, 206, 6, 387], 4, 1.0),
    ([2048], [2048], 16, 3.0),
    ([640, 64, 65], [1900, 64, 190], 128, 1.0),
    ([7 * i % 190 for i in range(70)], [7 * i % 190 + 131 * i % 400 for i in range(70)], 3, 1.0),
)


def _is_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def _check(prompts: Prompts, what: str) -> None:
    want, got = prompts.oracle(), prompts.attend()
    near(got, want, TOLERANCE, what)
    assert torch.equal(got, prompts.attend(heads_together=1)), f"{what}: bits depend on the order of the tiles"


def prompt_attention(draw: Draw) -> None:
    for case in CASES if _is_hopper() else ():
        _check(Prompts.draw(draw, *case), str(case)[:60])


def random_prompt_attention(draw: Draw) -> None:
    for i in range(20 if _is_hopper() else 0):
        requests = int(draw.integers(1, 40, 1))
        new = draw.integers(0, (40, 500)[i % 2], requests)
        length = (new + draw.integers(0, (300, 900)[i // 2 % 2], requests)).tolist()
        heads = (1, 3, 16)[i % 3]
        if new.sum():
            _check(Prompts.draw(draw, new.tolist(), length, heads), f"{new.tolist()} of {length}, {heads} heads")


def prompts_of_a_paged_cache(draw: Draw) -> None:
    """From latents to values, all heads at once or some, beside the kernel in Triton."""
    lengths, new = [900, 77, 300], [300, 77, 120]
    pages = draw.normal(60, 64, 576, dtype=torch.bfloat16)
    order = torch.randperm(60, generator=draw.generator).int()
    used = torch.zeros(60, dtype=torch.bool)
    for b, known in enumerate(lengths):
        used[order[20 * b : 20 * b + -(-known // 64)].long()] = True
    pages[~used.to(draw.device)] = torch.nan
    w = draw.normal(16 * 256, 512, dtype=torch.bfloat16, scale=512**-0.5)
    q = draw.normal(sum(new), 16, 192, dtype=torch.bfloat16)
    start = torch.tensor([0, *new]).cumsum(0).int().to(draw.device)
    table, length = order.view(3, 20).to(draw.device), torch.tensor(lengths).int().to(draw.device)
    context = PagedContext(pages, table, length, start)  # the host does not know the sum of the lengths
    inputs = q[..., :128], q[..., 128:], context, w, 0.1
    want = attend_prompts(*inputs, attend=expanded_triton.attend)
    for room in (1, 1 << 29):
        near(attend_prompts(*inputs, workspace_bytes=room), want, 2 * TOLERANCE, f"workspace of {room} bytes")
    chosen = kernel(q[..., :128], q[..., 128:], q.new_empty(5, 16, 256)).__name__
    assert chosen.endswith("eprt" if _is_hopper() else "triton"), chosen


ALL = (prompt_attention, random_prompt_attention, prompts_of_a_paged_cache)
