"""The schedule of latent attention and the sum of what it cuts, without a GPU (tests/emulated)."""

import ctypes
import platform
import shutil

import pytest
import torch
from torch import Tensor

from eprt.gpu import mla_decode
from eprt.gpu.mla_decode import KEYS, LATENT, ROWS, Lengths, MlaCombineParams, MlaScheduleParams
from tests.emulated.kernels import library

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)
OVERHEAD, CUT = 5, 4


def launch(ctas: int, name: str, params: ctypes.Structure, blocks: int) -> None:
    library(mla_decode.sources(ctas)[name], f"eprt::{name}").launch(ctypes.addressof(params), blocks, 256, 0)


class Step:
    """Lengths of a step, and what its schedule says."""

    def __init__(
        self, lengths: list[int], tokens: list[int] | None, heads: int, ctas: int, shares: int, whole: bool = False
    ):
        self.lengths, self.tokens, self.heads, self.ctas, self.shares = lengths, tokens, heads, ctas, shares
        self.length_B = torch.tensor(lengths, dtype=torch.int32)
        self.start_B1 = None if tokens is None else torch.tensor([0, *tokens]).cumsum(0).int()
        start = None if self.start_B1 is None else self.start_B1.data_ptr()
        self.all = Lengths(self.length_B.data_ptr(), start, len(lengths), heads)
        self.bound_S4 = torch.full((shares + 1, 4), -7, dtype=torch.int32)
        fields = self.bound_S4.data_ptr(), shares, OVERHEAD, CUT, whole
        launch(ctas, "mla_schedule", MlaScheduleParams(self.all, *fields), 1)
        self.bounds = [tuple(bound[:3]) for bound in self.bound_S4.tolist()]

    def rows(self, request: int) -> int:
        return self.heads * (1 if self.tokens is None else self.tokens[request])

    def units(self) -> list[tuple[int, int, int]]:
        """(request, group, blocks) of each."""
        group_rows = self.ctas * ROWS
        return [
            (request, group, -(-length // KEYS))
            for request, length in enumerate(self.lengths)
            for group in range(-(-self.rows(request) // group_rows))
        ]

    def segments(self, share: int) -> list[tuple[int, int, int, int]]:
        """(request, group, begin, end) as a cluster walks through them."""
        (request, group, block), last = self.bounds[share], self.bounds[share + 1]
        found = []
        for r, g, blocks in self.units():
            if (r, g) < (request, group) or (r, g) > last[:2]:
                continue
            begin, end = block if (r, g) == (request, group) else 0, last[2] if (r, g) == last[:2] else blocks
            if (r, g) < last[:2] or begin < end:
                found.append((r, g, begin, end))
        return found


CASES = [
    ([1], None, 128, 2, 66),
    ([4096] * 128, None, 128, 2, 66),
    ([131072, 1, 70, 0, 0, 5000], None, 16, 1, 132),
    ([100, 7, 900, 64, 65, 3000], [4, 1, 2, 0, 3, 1], 128, 2, 66),
    ([0, 0, 0], None, 128, 2, 4),
    ([10, 20], [0, 0], 128, 2, 4),
    ([0, 0, 9, 0], [1, 0, 2, 1], 64, 1, 3),
    ([3 + 11 * i % 9000 for i in range(700)], None, 128, 2, 66),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_block_of_every_unit_is_in_exactly_one_share(case):
    step = Step(*CASES[case])
    assert step.bounds == sorted(step.bounds) and step.bounds[-1] == (len(step.lengths), 0, 0)
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    work = []
    for share in range(step.shares):
        segments, slots = step.segments(share), []
        work.append(sum(end - begin for *_, begin, end in segments) + OVERHEAD * len(segments))
        for r, g, begin, end in segments:
            found.setdefault((r, g), []).append((begin, end))
            if (begin, end) != (0, -(-step.lengths[r] // KEYS)):
                slots.append(begin == 0)
        assert len(slots) == len(set(slots)), "a share has one slot for what it begins and one for what it continues"
    assert sorted(found) == [unit[:2] for unit in step.units()]
    for r, g, blocks in step.units():
        ends = [0, *(end for _, end in found[r, g])]
        assert [begin for begin, _ in found[r, g]] == ends[:-1] and ends[-1] == blocks
    # Cut in the middle, a unit begins twice; a cut is moved by at most one block. Shares may be fewer and not cut.
    total = sum(blocks + OVERHEAD for *_, blocks in step.units())
    assert max(work) <= -(-total // step.shares) + OVERHEAD + 2 + 2 * CUT


def test_shares_of_several_requests_are_as_long_as_those_of_one():
    """A share that ends one request and begins another has two overheads; 16 long requests on 66 clusters."""
    step = Step([32768] * 16, None, 128, 2, 66)
    work = []
    for share in range(66):
        segments = step.segments(share)
        work.append(sum(end - begin for *_, begin, end in segments) + OVERHEAD * len(segments))
    even = sum(work) / 66
    assert max(work) <= even + 3


@pytest.mark.parametrize("case", range(len(CASES)))
def test_whole_requests_are_computed_by_one_share_each(case):
    """So nothing that is added up depends on the other requests; shares are as even as whole units allow."""
    step = Step(*CASES[case], whole=True)
    found, work = [], []
    for share in range(step.shares):
        segments = step.segments(share)
        assert all((begin, end) == (0, -(-step.lengths[r] // KEYS)) for r, _, begin, end in segments)
        found += [segment[:2] for segment in segments]
        work.append(sum(end + OVERHEAD for *_, end in segments))
    assert found == [unit[:2] for unit in step.units()]
    longest = max((blocks + OVERHEAD for *_, blocks in step.units()), default=0)
    assert max(work) <= sum(work) / step.shares + longest


@pytest.mark.parametrize("requests, used, blocks", [(128, 64, 128), (64, 64, 64), (32, 64, 32)])
def test_equal_requests_are_not_cut_in_odd_places(requests, used, blocks):
    step = Step([4096] * requests, None, 128, 2, 66)
    work = [sum(end - begin for *_, begin, end in step.segments(share)) for share in range(66)]
    assert max(work) == blocks and sum(each > 0 for each in work) == used


@pytest.mark.parametrize("ctas, heads, tokens", [(2, 128, None), (1, 16, [2, 1, 1])])
def test_parts_of_cut_units_are_added_up_by_their_weights(ctas, heads, tokens):
    """Among them parts without a weight, whose memory holds NaN, and shares without a part."""
    step = Step([1500, 64, 900], tokens, heads, ctas, 9)
    rows, rng = ctas * ROWS, torch.Generator().manual_seed(5)
    num_tokens = 3 if tokens is None else sum(tokens)
    partial = torch.full((2 * step.shares, rows, LATENT), torch.nan)
    log_sum = torch.full((2 * step.shares, rows), torch.nan)
    out = torch.full((num_tokens * heads, LATENT), 99.0, dtype=torch.bfloat16)
    parts: dict[tuple[int, int], list[int]] = {}
    for share in range(step.shares):
        for r, g, begin, end in step.segments(share):
            if (begin, end) != (0, -(-step.lengths[r] // KEYS)):
                slot = 2 * share + (begin == 0)
                parts.setdefault((r, g), []).append(slot)
                log_sum[slot] = torch.randn(rows, generator=rng) * 20
                partial[slot] = torch.randn(rows, LATENT, generator=rng)
                log_sum[slot, 3], partial[slot, 3] = -torch.inf, torch.nan
                if len(parts[r, g]) == 2:
                    log_sum[slot, 5], partial[slot, 5] = -torch.inf, torch.nan
    assert parts and len(parts) < len(step.units()) and max(map(len, parts.values())) > 2
    fields = (partial.data_ptr(), log_sum.data_ptr(), out.data_ptr(), step.shares)
    params = MlaCombineParams(step.all, step.bound_S4.data_ptr(), *fields)
    launch(ctas, "mla_combine", params, (step.shares - 1) * rows // 8)
    first_row = [0, *torch.tensor([step.rows(r) for r in range(3)]).cumsum(0).tolist()]
    left = torch.ones(len(out), dtype=torch.bool)
    for (r, g), slots in parts.items():
        begin = first_row[r] + g * rows
        count = min(rows, first_row[r + 1] - begin)
        want = weighted_mean(partial[slots].double(), log_sum[slots].double())[:count]
        got = out[begin : begin + count].double()
        assert (got - want).norm() <= 3e-3 * want.norm() and torch.equal(got[3], torch.zeros_like(got[3]))
        left[begin : begin + count] = False
    assert (out[left] == 99).all(), "whole units were stored by the attention itself"


def weighted_mean(part_SRL: Tensor, log_sum_SR: Tensor) -> Tensor:
    weight = (log_sum_SR - log_sum_SR.amax(0)).exp2().nan_to_num(0.0)
    total = (weight[..., None] * part_SRL.nan_to_num(0.0)).sum(0)
    return total / weight.sum(0)[:, None].clamp_min(1e-300)
