"""DeepSeek-V4's row operators on GPUs against the CPU's: turned rows, streams, pooling, copies, the cache's formats."""

from dataclasses import replace

import torch
from torch import Tensor

from eprt import ops
from eprt.ops import cuda
from eprt.ops.elementwise import Rotation
from eprt.ops.entry_format import EntryFormat
from eprt.ops.index_format import IndexFormat
from eprt.ops.streams import StreamProjection
from eprt.ops.turned_rows import RowNorm
from tests.gpu.draw import DTYPES, ROUNDING, Draw, near

FP8 = torch.uint8
# Heads, values, of them rotated.
ROWS = ((64, 512, 64), (1, 512, 64), (3, 128, 64), (5, 40, 8), (1, 70, 6), (9, 32, 32))


def turned_rows(draw: Draw) -> None:
    """Rows that lie in a wider product; with and without a norm; forwards and back; in both dtypes."""
    for i, (heads, size, turning) in enumerate(ROWS):
        rotation = draw.rotation(turning, 3, True)
        for dtype in DTYPES if i == 0 else DTYPES[i % 2 :][:1]:
            x = draw.normal(3, heads + 1, size + 4, dtype=dtype)[:, :heads, :size]
            weight = draw.normal(size, dtype=dtype)
            for norm, backwards, out in (
                (RowNorm(1e-6), False, None),
                (RowNorm(1e-5, weight), False, torch.float32),
                (RowNorm(1e-5, weight), True, torch.bfloat16),
                (None, True, None),
            ):
                got = cuda.turn_rows(x, rotation, norm, backwards, out)
                want = ops.turn_rows(x.cpu(), _on_cpu(rotation), _norm_on_cpu(norm), backwards, out)
                assert got.dtype == want.dtype
                rounding = max(ROUNDING[dtype], ROUNDING[got.dtype])
                near(got, want, rounding, f"turned {heads} {size} {turning} {dtype} {norm is None} {backwards}")
    assert cuda.turn_rows(draw.normal(0, 4, 16), draw.rotation(8, 0, True)).shape == (0, 4, 16)


def streams(draw: Draw, shapes=((3, 4, 40), (66, 4, 24), (1, 2, 64), (2, 3, 60), (0, 4, 16))) -> None:
    """Rows that fill a tile and some; columns that fill splits and pieces, and some."""
    for rows, num, size in shapes:
        outputs = num * (2 + num)
        for dtype in DTYPES:
            x = draw.normal(rows, num, size, dtype=dtype)
            fn, base, scale = draw.normal(outputs, num * size, scale=0.1), draw.normal(outputs), draw.normal(3).abs()
            p = StreamProjection(fn, base, scale, 1e-6, 1e-5, 3 if rows > 50 else 20)
            got = cuda.mix_streams(x, p)
            on_cpu = replace(p, fn_KW=fn.cpu(), base_K=base.cpu(), scale=scale.cpu())
            want = ops.mix_streams(x.cpu(), on_cpu)
            for what, a, b in zip(("row", "mixed", "post"), got, want):
                assert a.dtype == b.dtype
                near(a, b, max(ROUNDING[a.dtype], 2e-5), f"{what} of {rows} {num} {size} {dtype}")
            head = StreamProjection(fn[:num].contiguous(), base[:num].contiguous(), scale[:1].contiguous(), 1e-6, 1e-5)
            of_cpu = replace(head, fn_KW=head.fn_KW.cpu(), base_K=head.base_K.cpu(), scale=head.scale.cpu())
            collapsed = ops.collapse_streams(x.cpu(), of_cpu)
            near(cuda.collapse_streams(x, head), collapsed, max(ROUNDING[dtype], 2e-5), f"collapse {rows} {size}")
            y = draw.normal(rows, size, dtype=dtype)
            expanded = ops.expand_streams(want[1], want[2], y.cpu())
            again = cuda.expand_streams(want[1].to(draw.device), want[2].to(draw.device), y)
            near(again, expanded, ROUNDING[dtype], f"expand {rows} {num} {size} {dtype}")


def large_streams(draw: Draw) -> None:
    streams(draw, ((1, 4, 7168), (17, 4, 4096), (130, 4, 7168), (33, 4, 2050)))


def stream_weights_of_few_iterations(draw: Draw) -> None:
    """What one more step would change shows."""
    x, fn, base = draw.normal(2, 4, 32), draw.normal(24, 128, scale=0.3), draw.normal(24, scale=2.0)
    for iterations in (0, 1, 2):
        p = StreamProjection(fn, base, draw.normal(3).abs() + 1, 1e-2, 1e-5, iterations)
        on_cpu = replace(p, fn_KW=p.fn_KW.cpu(), base_K=p.base_K.cpu(), scale=p.scale.cpu())
        near(cuda.mix_streams(x, p)[1], ops.mix_streams(x.cpu(), on_cpu)[1], 2e-5, f"{iterations} iterations")


def pooling(draw: Draw) -> None:
    """Tokens in a tensor, and in rings whose pages lie apart with NaN around; slots of none; an entry of none is 0."""
    for ratio, size, overlaps in ((4, 512, True), (4, 13, True), (128, 40, False), (128, 512, False), (4, 128, True)):
        channels, slots = size * (1 + overlaps), ratio * (1 + overlaps)
        memory = torch.full((6, 50, 2 * channels + 3), torch.nan, device=draw.device)
        rings = memory[:, 5:45, 1 : 1 + 2 * channels].unflatten(2, (2, channels))
        rings.copy_(draw.normal(6, 40, 2, channels) * 3)
        state, index = rings.flatten(0, 1), draw.integers(0, 240, 5, slots)
        index[0, :ratio] = -1
        index[0, 0] = 3
        first = ratio if overlaps else 0
        want = ops.pool_entries(state.cpu(), index.cpu(), size, first)
        near(cuda.pool_entries(state, index, size, first), want, 5e-6, f"pool {ratio} {size}")
        near(cuda.pool_entries(rings, index, size, first), want, 5e-6, f"pool of rings {ratio} {size}")
        assert torch.equal(ops.pool_entries(rings.cpu(), index.cpu(), size, first), want)
        index[1] = -1
        assert not cuda.pool_entries(rings, index, size, first)[1].any()
        assert cuda.pool_entries(state, index[:0], size, first).shape == (0, size)


def states_in_rings(draw: Draw) -> None:
    """The oracle's bits; rings' pages lie apart, products are parts of wider rows, negative slots get nothing."""
    for channels, ratio in ((1024, 4), (512, 128), (13, 4), (1300, 4)):
        place, position = draw.normal(ratio, channels), torch.tensor([0, 3, 4, 255, 700, 5], device=draw.device)
        slot = torch.tensor([11, -1, 3, 0, 6, -7], device=draw.device)
        product = draw.normal(6, 2 * channels + 5)[:, 2 : 2 + 2 * channels]
        memory = torch.zeros(3, 4 * 2 * channels + 9, device=draw.device)
        rings = memory[:, 4 : 4 + 8 * channels].unflatten(1, (4, 2 * channels))
        cuda.insert_states(rings, slot, product, place, position)
        want = torch.zeros_like(rings.cpu())
        ops.insert_states(want, slot.cpu(), product.cpu().clone(), place.cpu(), position.cpu())
        assert torch.equal(rings.cpu(), want) and want.any(), (channels, ratio)
        assert not memory[:, :4].any() and not memory[:, 4 + 8 * channels :].any()
        cuda.insert_states(rings, slot[:0], product[:0], place, position[:0])


def copied_rows(draw: Draw) -> None:
    """Of every size of words, from and to pages that lie apart; negative rows are left out."""
    for width, dtype in (
        (6, torch.float32),
        (584, FP8),
        (132, FP8),
        (7, FP8),
        (5, torch.bfloat16),
        (1500, torch.int64),
    ):
        values = draw.integers(0, 200, 7, width).to(dtype)
        gap = 8 if width % 2 == 0 else 1
        memory = torch.zeros(5, 4 * width + 2 * gap, dtype=dtype, device=draw.device)
        pages = memory[:, gap : gap + 4 * width].unflatten(1, (4, width))
        to, source = torch.tensor([19, -1, 6, 3, 0]), torch.tensor([6, 2, 2, -4, 0])
        cuda.copy_rows(pages, to.to(draw.device), values, source.to(draw.device))
        want = torch.zeros_like(pages.cpu())
        ops.copy_rows(want, to, values.cpu(), source)
        assert torch.equal(pages.cpu(), want) and want.any(), (width, dtype)
        assert not memory[:, :gap].any() and not memory[:, gap + 4 * width :].any()
        back = torch.zeros(5, width, dtype=dtype, device=draw.device)
        cuda.copy_rows(back, None, pages, to.clamp(min=0).to(draw.device))
        assert torch.equal(back.cpu(), want.flatten(0, 1)[to.clamp(min=0)])
        cuda.copy_rows(back, to[:0].to(draw.device), values, None)


def encoded_rows(draw: Draw) -> None:
    """The oracle's bytes, of values of all magnitudes, of zeros and of what is near the bounds of e4m3 and e2m1."""
    for size, turning in ((512, 64), (128, 32), (32, 8), (70, 6), (64, 0)):
        entry, values = EntryFormat(size, turning, FP8), _all_magnitudes(draw, size)
        for dtype in DTYPES:
            got = cuda.encode_entries(values.to(dtype), entry).cpu()
            assert torch.equal(got, entry.encode(values.to(dtype).cpu())), (size, turning, dtype)
    for size in (128, 16, 4, 64):
        for fp4 in (False, True):
            index, values = IndexFormat(size, FP8, fp4), _all_magnitudes(draw, size)
            for dtype in DTYPES:
                got = cuda.encode_keys(values.to(dtype), index).cpu()
                assert torch.equal(got, index.encode(values.to(dtype).cpu())), (size, fp4, dtype)


def _all_magnitudes(draw: Draw, size: int) -> Tensor:
    values = draw.normal(20, size).cpu() * torch.logspace(-30, 30, 20)[:, None]
    values *= torch.randint(-12, 3, (20, size), generator=draw.generator).float().exp2()
    values[-1] = 0
    values[-2] = torch.linspace(-464, 464, size)
    values[-3] = torch.arange(size) * 2.0**-10
    values[-3, 0] = 448
    values[-4] = torch.arange(size) % 25 * 0.25 - 3  # the bounds between codes of e2m1
    values[-4, ::32] = 6
    return values.to(draw.device)


def transformed_rows(draw: Draw) -> None:
    for heads, size, turning in ((64, 128, 64), (3, 16, 8), (17, 32, 32), (9, 256, 64), (5, 512, 64)):
        rotation = draw.rotation(turning, 3, True)
        for dtype in DTYPES:
            x = draw.normal(3, heads + 1, size, dtype=dtype)[:, :heads]
            for cache in (dtype, FP8):
                got, on_cpu = cuda.as_cached(x, cache), x.cpu()
                near(got, ops.as_cached(on_cpu, cache), ROUNDING[dtype], f"transform {heads} {size} {dtype} {cache}")
                want = ops.turned_queries(on_cpu, _on_cpu(rotation), cache)
                near(cuda.turned_queries(x, rotation, cache), want, ROUNDING[dtype], f"queries {size} {dtype} {cache}")


def inserted_rows(draw: Draw) -> None:
    """The separate operators' bytes, and the CPU's to rounding; negative slots and what lies around are left."""
    fp32, bf16 = DTYPES
    for size, turning, dtype, stored in (
        (512, 64, bf16, FP8),
        (512, 64, bf16, bf16),
        (512, 64, fp32, FP8),
        (70, 6, fp32, FP8),
        (32, 8, bf16, FP8),
        (70, 6, fp32, fp32),
    ):
        _insert(draw, size, turning, dtype, EntryFormat(size, turning, stored))
    for size, turning, dtype, stored, fp4 in (
        (128, 64, bf16, FP8, False),
        (128, 64, bf16, FP8, True),
        (128, 64, bf16, bf16, False),
        (128, 64, fp32, FP8, False),
        (32, 8, fp32, FP8, True),
        (16, 8, bf16, FP8, False),
        (256, 64, fp32, FP8, True),
    ):
        _insert(draw, size, turning, dtype, IndexFormat(size, stored, fp4))


def _insert(draw: Draw, size: int, turning: int, dtype: torch.dtype, how: EntryFormat | IndexFormat) -> None:
    x, rotation = draw.normal(5, size + 4, dtype=dtype)[:, :size], draw.rotation(turning, 5, True)
    norm = RowNorm(1e-6, draw.normal(size, dtype=dtype))
    slot = torch.tensor([7, -1, 0, 19, 12], device=draw.device)
    memory = torch.zeros(5, 4 * how.width + 32, dtype=how.dtype, device=draw.device)
    pages, apart = (each[:, 16 : 16 + 4 * how.width].unflatten(1, (4, how.width)) for each in (memory, memory.clone()))
    turned, want = cuda.turn_rows(x.unsqueeze(1), rotation, norm), torch.zeros(5, 4, how.width, dtype=how.dtype)
    what = f"insert {size} {dtype} {how}"
    on_cpu = want, slot.cpu(), x.cpu()
    if isinstance(how, EntryFormat):
        cuda.insert_rows(pages, slot, x, how, rotation, norm)
        ops.insert_rows(*on_cpu, how, _on_cpu(rotation), _norm_on_cpu(norm))
        rows = cuda.encode_entries(turned.squeeze(1), how)
    else:
        cuda.insert_keys(pages, slot, x, how, rotation, norm)
        ops.insert_keys(*on_cpu, how, _on_cpu(rotation), _norm_on_cpu(norm))
        rows = cuda.encode_keys(cuda.as_cached(turned, how.dtype).squeeze(1), how)
    cuda.copy_rows(apart, slot, rows, None)
    got, chain, decoded = (how.decode(each.flatten(0, 1).cpu()) for each in (pages, apart, want))
    if isinstance(how, EntryFormat):
        assert torch.equal(pages, apart), what
    else:  # the transform of queries sums in another order
        near(got, chain, 0.02 if how.is_transformed else 0.0, what)
    # A value may fall to its neighbour in e4m3, or in e2m1.
    near(got, decoded, 0.1 if how.width < size else 0.02 if how.dtype == FP8 else 2 * ROUNDING[dtype], what)
    assert not memory[:, :16].any() and not memory[:, 16 + 4 * how.width :].any()
    assert not pages.flatten(0, 1)[[1, 2, 3, 4, 5, 6, 8]].any()


def _on_cpu(rotation: Rotation) -> Rotation:
    return Rotation(rotation.cos_sin_PR.cpu(), rotation.position_T.cpu(), rotation.interleaved)


def _norm_on_cpu(norm: RowNorm | None) -> RowNorm | None:
    if norm is None or norm.weight_D is None:
        return norm
    return replace(norm, weight_D=norm.weight_D.cpu())


SMALL = (
    turned_rows,
    streams,
    stream_weights_of_few_iterations,
    pooling,
    states_in_rings,
    copied_rows,
    encoded_rows,
    transformed_rows,
    inserted_rows,
)
ALL = (*SMALL, large_streams)
