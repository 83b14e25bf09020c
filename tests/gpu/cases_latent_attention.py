"""The latent cache and the attention over it against the slow oracles."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from eprt.ops import cuda
from eprt.ops.attention import PagedContext
from eprt.ops.cuda import attention as cuda_attention
from eprt.ops.cuda import expanded_triton
from eprt.ops.cuda.mla_expanded import attend_prompts
from eprt.ops.cuda.mla_triton import attend
from eprt.ops.elementwise import Rotation
from eprt.ops.kv_format import KVFormat
from tests import reference_ops as reference
from tests.gpu.draw import DTYPES, ROUNDING, Draw, cpu, near


def ropes(draw: Draw) -> None:
    for dtype in DTYPES:
        for tokens, heads, size in ((3, 128, 64), (4, 1, 8), (2, 5, 32)):
            x = draw.normal(tokens, heads, size + 16, dtype=dtype)[..., 16:]
            for interleaved in (True, False):
                rotation = draw.rotation(size, tokens, interleaved)
                want, what = reference.rope(x.cpu(), _rotation_on_cpu(rotation)), f"rope {interleaved} {dtype}"
                near(cuda.rope(x, rotation), want, ROUNDING[dtype], f"{what} {heads}x{size}")


def _rotation_on_cpu(rotation: Rotation) -> Rotation:
    return Rotation(*cpu(rotation.cos_sin_PR, rotation.position_T), rotation.interleaved)


def cache(draw: Draw) -> None:
    for dtype in DTYPES:
        pages, entries = draw.normal(6, 4, 40, dtype=dtype), draw.normal(5, 40, dtype=dtype)
        slots = torch.tensor([23, 0, 7, 8, 22]).to(draw.device)
        want = pages.cpu().clone()
        reference.cache_insert(want, slots.cpu(), entries.cpu())
        cuda.cache_insert(pages, slots, entries)
        assert torch.equal(pages.cpu(), want)
    entry = KVFormat(40, 8, torch.uint8)
    pages, entries = torch.zeros(6, 4, entry.width, dtype=torch.uint8, device=draw.device), draw.normal(5, 48)
    entries[2, :40] = 0
    want = pages.cpu()
    reference.cache_insert(want, slots.cpu(), entries.cpu(), 8)
    cuda.cache_insert(pages, slots, entries, 8)
    got, want = entry.decode(pages.cpu()), entry.decode(want)
    # The interpreter cuts off where GPUs round: half a step of e4m3 apart.
    near(got[..., :40], want[..., :40], 0.05, "fp8 latents")
    near(got[..., 40:], want[..., 40:], ROUNDING[torch.bfloat16], "rotated keys beside fp8 latents")


def latents(draw: Draw) -> None:
    """Norm, rotation and insertion in one kernel: the separate operators, one after the other."""
    for dtype, fp8 in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        for latent, rope, interleaved in ((40, 8, True), (512, 64, True), (512, 64, False)):
            entry = KVFormat(latent, rope, torch.uint8 if fp8 else dtype)
            pages = torch.zeros(6, 4, entry.width, dtype=entry.dtype, device=draw.device)
            kv = draw.normal(5, latent + rope + 8, dtype=dtype)[:, 8:]
            weight, rotation = draw.normal(latent, dtype=dtype), draw.rotation(rope, 5, interleaved)
            slots = torch.tensor([23, 0, 7, 8, 22]).to(draw.device)
            norm = reference.rms_norm(*cpu(kv[:, :latent], weight), 1e-6)
            key = reference.rope(kv[:, None, latent:].cpu(), _rotation_on_cpu(rotation))[:, 0]
            want = pages.cpu()
            reference.cache_insert(want, slots.cpu(), torch.cat((norm, key), dim=-1), rope)
            cuda.latent_insert(pages, slots, kv, weight, 1e-6, rotation)
            got, want = entry.decode(pages.cpu()), entry.decode(want)
            tolerance = 0.05 if fp8 else ROUNDING[dtype]
            near(got[..., :latent], want[..., :latent], tolerance, f"latents {dtype} {'fp8' if fp8 else ''}")
            near(got[..., latent:], want[..., latent:], ROUNDING[dtype], f"rotated keys {dtype}")


def attention(draw: Draw, heads_and_sizes=((4, 32, 8, 16, 16), (16, 64, 16, 32, 32), (3, 48, 8, 24, 20))) -> None:
    for heads, latent, rope, nope, value in heads_and_sizes:
        for dtype, fp8 in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            lengths, new = [1, 9, 23, 17, 5], [1, 4, 23, 0, 2]
            pages = draw.normal(40, 4, latent + rope, dtype=dtype)
            if fp8:
                entry = KVFormat(latent, rope, torch.uint8)
                pages = entry.encode(pages.view(160, -1)).view(40, 4, entry.width)
            pages_of = [torch.randperm(40, generator=draw.generator)[:10] for _ in lengths]
            table = torch.stack(pages_of).int().to(draw.device)
            length = torch.tensor(lengths).int().to(draw.device)
            w = draw.normal(heads * (nope + value), latent, dtype=dtype, scale=latent**-0.5)
            start = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()]).int().to(draw.device)
            tolerance = {torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
            for name, tokens, first_rows in (("mla_decode", 5, None), ("mla_extend", sum(new), start)):
                q = draw.normal(tokens, heads, nope + rope, dtype=dtype)
                context = PagedContext(pages, table, length, first_rows)
                inputs, on_cpu = (q[..., :nope], q[..., nope:], context, w, 0.2), _context_on_cpu(context)
                want = getattr(reference, name)(*cpu(q[..., :nope], q[..., nope:]), on_cpu, w.cpu(), 0.2)
                what = f"{name} {heads} heads {dtype}{' fp8 cache' if fp8 else ''}"
                near(got := getattr(cuda, name)(*inputs), want, tolerance, what)
                if name == "mla_decode":
                    rotation = draw.rotation(rope, tokens, heads > 3)
                    turned = reference.rope(q[..., nope:].cpu(), _rotation_on_cpu(rotation))
                    want_turned = reference.mla_decode(q[..., :nope].cpu(), turned, on_cpu, w.cpu(), 0.2)
                    near(cuda.mla_decode(*inputs, rotation, {}), want_turned, tolerance, f"{what}, rotated")
                else:  # pages are copied before: the same bits
                    far = *inputs[:2], replace(context, is_far=True), w, 0.2
                    assert torch.equal(cuda.mla_extend(*far), got), what
            if dtype == torch.bfloat16:  # heads one by one, or at once; a context of known size, or not
                num_tokens, room = (sum(lengths), 1) if fp8 else (None, 1 << 20)
                inputs = *inputs[:2], replace(context, num_tokens=num_tokens), w, 0.2
                got = attend_prompts(
                    *inputs, workspace_bytes=room, attend=partial(expanded_triton.attend, tile=16, keys=16)
                )
                near(got, want, tolerance, f"{what}, expanded")
        splits(draw, heads, latent, rope, table, length)


def _context_on_cpu(context: PagedContext) -> PagedContext:
    return PagedContext(*(part.cpu() if isinstance(part, Tensor) else part for part in vars(context).values()))


def splits(draw: Draw, heads: int, latent: int, rope: int, table: Tensor, length: Tensor) -> None:
    """Any number of splits, also more than there are tokens, gives the same."""
    pages = draw.normal(40, 4, latent + rope, dtype=torch.bfloat16)
    q, r = draw.normal(5, heads, latent, dtype=pages.dtype), draw.normal(5, heads, rope, dtype=pages.dtype)
    context = PagedContext(pages, table, length)
    whole = attend(q, r, context, 0.2, num_splits=1)
    for count in (2, 3, 7):
        near(attend(q, r, context, 0.2, num_splits=count), whole, 5e-3, f"{count} splits")


def libraries(draw: Draw) -> None:
    """Every attention kernel that is installed, at DeepSeek's sizes, also recorded in a graph whose lengths change."""
    for name in cuda_attention.installed():
        length = torch.tensor([1, 64, 1000, 129]).int().to(draw.device)
        pages = draw.normal(40, 64, 576, dtype=torch.bfloat16)
        table = torch.stack([torch.randperm(40, generator=draw.generator)[:16] for _ in range(4)]).int().to(draw.device)
        q, w = draw.normal(4, 128, 192, dtype=torch.bfloat16), draw.normal(128 * 256, 512, scale=0.04).bfloat16()
        latent = torch.einsum("tnc,ncl->tnl", q[..., :128], w.view(128, 256, 512)[:, :128])
        kernel = cuda_attention.kernels(name)[0]
        context = PagedContext(pages, table, length)
        inputs = latent, q[..., 128:], context, 0.08
        if kernel.refusal(latent, q[..., 128:], context) is not None:
            continue
        kernel.attend(*inputs)
        graph, plans = torch.cuda.CUDAGraph(), {}
        with torch.cuda.graph(graph):
            kernel.attend(*inputs, plans=plans)
            recorded = kernel.attend(*inputs, plans=plans)  # by the first one's plan
        for lengths in ([1, 64, 1000, 129], [1024, 1, 1, 513]):
            length.copy_(torch.tensor(lengths))
            graph.replay()
            value = torch.einsum("tnl,nvl->tnv", recorded, w.view(128, 256, 512)[:, 128:])
            on_cpu = _context_on_cpu(context)
            want = reference.mla_decode(*cpu(q[..., :128], q[..., 128:]), on_cpu, w.cpu(), 0.08)
            near(value, want, 2e-2, f"{name}, lengths {lengths}")


SMALL = (ropes, cache, latents)
ALL = (*SMALL, attention, libraries)
