"""How the benchmark recognises the same tokens in two exchanges' groups."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.ep.by_expert import plain, tag_of, tagged, with_permutation
from benchmarks.tools.timing import Timing
from eprt.ep.reference import quantize


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_a_tag_survives_both_payloads(rank):
    x = tagged(torch.randn(300, 256).bfloat16(), rank)
    want = torch.arange(300) + (rank << 18)
    assert torch.equal(tag_of(plain(x, None)), want)
    assert torch.equal(tag_of(plain(*quantize(x))), want)


def test_tokens_keep_their_other_columns():
    x = torch.randn(5, 256).bfloat16()
    assert torch.equal(tagged(x, 3)[:, 7:], x[:, 7:])
    assert x[0, 0] != 448, "the tokens themselves are not changed"


def test_a_peer_pays_for_the_permutation_of_its_own_direction():
    def timing(us: float) -> Timing:
        return Timing(us, us - 1, us + 1, 25)

    times = {
        "eprt": [timing(300), timing(400)],
        "deep_ep dispatch": [timing(320)],
        "deep_ep combine": [timing(410)],
        "permute": [timing(70), timing(140)],
    }
    there, back = (with_permutation(times, ["deep_ep"], i) for i in (0, 1))
    assert there == {"eprt": timing(300), "deep_ep": timing(320), "deep_ep_permute": Timing(390, 388, 392, 25)}
    assert back["deep_ep_permute"].median_s == 550
    assert with_permutation(times, [], 1) == {"eprt": timing(400)}
