"""EntryFormat: the kernel's bytes are the oracle's; what is lost is what e4m3 cannot hold; sizes are as published."""

import pytest
import torch

from eprt.ops.entry_format import GROUP, EntryFormat

FP8, SIZES = torch.uint8, [(512, 64), (128, 32), (32, 8), (70, 6), (64, 0)]


def values_of(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Of all magnitudes, in rows and within them; the last rows are of zeros, and of what is near e4m3's bounds."""
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(rows, size, generator=generator) * torch.logspace(-30, 30, rows)[:, None]
    values *= torch.randint(-12, 3, (rows, size), generator=generator).float().exp2()
    values[-1] = 0
    values[-2] = torch.linspace(-464, 464, size)
    values[-3] = torch.arange(size) * 2.0**-10  # between the smallest numbers of e4m3
    values[-3, 0] = 448
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "rope"), SIZES)
def test_every_byte_is_the_oracles(size, rope, dtype):
    entry, values = EntryFormat(size, rope, FP8), values_of(64, size, dtype)
    stored = entry.encode(values)
    assert torch.equal(stored, entry.encode_slowly(values)) and stored.shape == (64, entry.width)
    assert torch.equal(entry.encode(values[5:6]), stored[5:6])
    again = entry.encode(entry.decode(stored))
    assert torch.equal(entry.decode(again), entry.decode(stored)), "what it holds it holds exactly"


@pytest.mark.parametrize(("size", "rope"), SIZES)
def test_rotated_values_keep_bfloat16_and_the_others_four_bits(size, rope):
    entry = EntryFormat(size, rope, FP8)
    values = torch.randn(200, size, generator=torch.Generator().manual_seed(1)) * 3
    values[:, 1] *= 100  # its group alone is coarser for it
    got, plain = entry.decode(entry.encode(values)), size - rope
    assert torch.equal(got[:, plain:], values[:, plain:].bfloat16().float())
    assert torch.equal(got, got.bfloat16().float()), "bfloat16 holds all of it"
    most = torch.nn.functional.pad(values[:, :plain].abs(), (0, -plain % GROUP)).unflatten(1, (-1, GROUP)).amax(-1)
    bound = torch.maximum(values[:, :plain].abs() / 16, most.repeat_interleave(GROUP, 1)[:, :plain] * 2.0**-17)
    assert ((got - values)[:, :plain].abs() <= bound).all()


def test_an_entry_of_v4_takes_584_bytes():
    assert EntryFormat(512, 64, FP8).width == 448 + 128 + 7 + 1
    assert EntryFormat(512, 64, torch.bfloat16).width == 512
    values = torch.randn(3, 512)
    assert torch.equal(EntryFormat(512, 64, torch.bfloat16).encode(values), values.bfloat16())
    with pytest.raises(ValueError, match=r"a multiple of 2 values, not 65 and 8; use --kv-cache-dtype bf16"):
        EntryFormat(65, 8, FP8)
