"""Attention to shared keys and the pooling of entries, every instruction set against plain torch; rows are alone."""

from dataclasses import replace

import pytest
import torch

from eprt.ops.entry_format import EntryFormat
from eprt.ops.shared_attention import SeenEntries, SeenTokens, pool_entries, shared_attention
from tests import reference_v4 as reference


def case(rows: int, heads: int, size: int, dtype: torch.dtype, chosen: bool):
    """Requests that see windows and entries of different lengths; pages with NaN around what is seen."""
    generator = torch.Generator().manual_seed(rows * size)
    query = torch.randn(rows, heads, size, generator=generator).to(dtype)
    local = torch.randn(rows + 20, size, generator=generator).to(dtype)
    begin = torch.randint(0, 10, (rows,), generator=generator)
    end = begin + torch.randint(1, 10, (rows,), generator=generator)
    memory = torch.full((7, 4 * size + 3), torch.nan, dtype=dtype)
    pages = memory[:, : 4 * size].unflatten(1, (4, size))
    request = (torch.arange(rows) // 3).int()
    table = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(rows // 3 + 1)])
    num = torch.randint(0, 12, (rows,), generator=generator).int()
    for t in range(rows):
        used = table[request[t]][: -(-int(num[t]) // 4)]
        pages[used] = torch.randn(len(used), 4, size, generator=generator).to(dtype)
    slots = None
    if chosen:
        slots = torch.full((rows, 5), -1, dtype=torch.int32)
        for t in range(rows):
            entry = torch.randperm(int(num[t]), generator=generator)[:5].sort().values
            slots[t, : len(entry)] = (table[request[t]][entry // 4] * 4 + entry % 4).int()
        num = num.clamp(max=5)
    sink = torch.randn(heads, generator=generator)
    return query, SeenTokens(local, begin, end), SeenEntries(pages, table, request, num, slots), sink


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "size"), [(11, 4, 64), (5, 6, 40), (3, 1, 9), (0, 4, 16)])
def test_kernel_equals_plain_torch(isa, rows, heads, size, dtype, chosen):
    args = case(rows, heads, size, dtype, chosen)
    want = reference.shared_attention(*args, 0.3)
    torch.testing.assert_close(shared_attention(*args, 0.3), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size", "rope"), [(4, 512, 64), (6, 40, 8), (1, 70, 6)])
def test_fp8_entries_are_read_as_what_they_hold(isa, heads, size, rope, dtype, chosen):
    """To the bit what bfloat16 keys with these values give, and plain torch's to rounding; padding is not read."""
    query, tokens, entries, sink = case(9, heads, size, dtype, chosen)
    fp8 = EntryFormat(size, rope, torch.uint8)
    local_XW, pages_XW = fp8.encode(tokens.local_XD), fp8.encode(entries.pages_PED.flatten(0, 1).nan_to_num(1e9))
    apart = torch.full((7, 4 * fp8.width + 24), 0xFF, dtype=torch.uint8)
    stored_PEW = apart[:, : 4 * fp8.width].unflatten(1, (4, fp8.width))
    stored_PEW.copy_(pages_XW.unflatten(0, (7, 4)))
    stored = replace(tokens, local_XD=local_XW), replace(entries, pages_PED=stored_PEW)
    got = shared_attention(query, *stored, sink, 0.3, rope)
    held = fp8.decode(local_XW), fp8.decode(pages_XW).unflatten(0, (7, 4))
    plain = replace(tokens, local_XD=held[0]), replace(entries, pages_PED=held[1])
    torch.testing.assert_close(got, reference.shared_attention(query, *plain, sink, 0.3), rtol=2e-5, atol=2e-5)
    same = replace(tokens, local_XD=held[0].to(dtype)), replace(entries, pages_PED=held[1].bfloat16())
    assert torch.equal(got, shared_attention(query, *same, sink, 0.3))
    with pytest.raises(ValueError, match=rf"\[X, {fp8.width}\]"):
        shared_attention(query, same[0], stored[1], sink, 0.3, rope)


@pytest.mark.parametrize("chosen", [False, True])
def test_a_row_has_the_same_bits_in_any_batch(isa, chosen):
    query, tokens, entries, sink = case(12, 8, 128, torch.bfloat16, chosen)
    whole = shared_attention(query, tokens, entries, sink, 0.1)
    for part in (slice(0, 1), slice(4, 7), slice(11, 12)):
        some = SeenTokens(tokens.local_XD, tokens.begin_T[part], tokens.end_T[part])
        slots = None if entries.slot_TK is None else entries.slot_TK[part]
        fewer = replace(entries, request_T=entries.request_T[part], num_T=entries.num_T[part], slot_TK=slots)
        assert torch.equal(shared_attention(query[part], some, fewer, sink, 0.1), whole[part])


def test_what_lies_outside_is_refused():
    query, tokens, entries, sink = case(6, 4, 16, torch.float32, False)
    with pytest.raises(ValueError, match=r"query 2: sees tokens \d+ to 99 of 26"):
        beyond = tokens.end_T.clone()
        beyond[2] = 99
        shared_attention(query, replace(tokens, end_T=beyond), entries, sink, 1.0)
    with pytest.raises(ValueError, match=r"query 0: sees .* 13 entries of request 0; there are 3 requests of up to 3"):
        shared_attention(query, tokens, replace(entries, num_T=torch.full((6,), 13)), sink, 1.0)
    with pytest.raises(ValueError, match=r"query 0: sees .* pages must be below 7"):
        shared_attention(query, tokens, replace(entries, table_BP=entries.table_BP + 7, num_T=torch.ones(6)), sink, 1.0)
    slots = torch.full((6, 2), 28, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"query 0: "):
        few = replace(entries, slot_TK=slots, num_T=torch.ones(6))
        shared_attention(query, tokens, few, sink, 1.0)
    with pytest.raises(ValueError, match=r"tokens torch.bfloat16"):
        shared_attention(query, replace(tokens, local_XD=tokens.local_XD.bfloat16()), entries, sink, 1.0)
    with pytest.raises(ValueError, match=r"sink must be torch.float32 \[4\]"):
        shared_attention(query, tokens, entries, sink[:3], 1.0)


@pytest.mark.parametrize(("ratio", "size", "overlaps"), [(4, 32, True), (4, 13, True), (128, 40, False)])
def test_pooling_equals_plain_torch_and_leaves_out_what_is_not_there(isa, ratio, size, overlaps):
    generator = torch.Generator().manual_seed(size)
    channels = size * (1 + overlaps)
    state = torch.randn(300, 2, channels, generator=generator) * 3
    index = torch.randint(0, 300, (7, ratio * (1 + overlaps)), generator=generator)
    if overlaps:
        index[0, :ratio] = -1
    args = state, index, size, ratio if overlaps else 0
    got = pool_entries(*args)
    torch.testing.assert_close(got, reference.pool_entries(*args), rtol=1e-5, atol=1e-5)
    assert torch.equal(pool_entries(state, index[3:4], *args[2:]), got[3:4])
    with pytest.raises(ValueError, match=r"entry 2: one of its tokens is not in -1\.\.299"):
        index[2, 1] = 300
        pool_entries(*args)
