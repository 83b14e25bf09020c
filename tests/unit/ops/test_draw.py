"""The draw kernel against its oracle, at every instruction set, and what a draw may depend on."""

import numpy as np
import pytest
import torch

from eprt.ops import draw as draw_module
from eprt.ops.draw import draw, largest
from tests import reference_ops as reference

# Kernel and oracle round weights and sums differently: near a boundary of the cumulative distribution, or of top_p and
# min_p, either may be right.
NEAR = 2e-6


def make(rows: int, vocab: int, seed: int, *, spread: float = 3.0, coarse: bool = False) -> tuple[torch.Tensor, dict]:
    rng = np.random.default_rng(seed)
    logits_XV = torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32)) * spread
    given = {
        "temperature": rng.choice([0.3, 0.8, 1.0, 2.0], rows).astype(np.float32),
        "min_p": rng.choice([0.0, 0.0, 0.03, 1.0], rows),
        "top_k": rng.choice([0, 1, 5, vocab // 2, vocab, 10 * vocab], rows),
        "top_p": rng.choice([1.0, 0.95, 0.5, 1e-3], rows),
        "u": rng.random(rows),
    }
    return (logits_XV.round() if coarse else logits_XV), given


def check(logits_XV: torch.Tensor, row_Y: np.ndarray, given: dict, token_Y: torch.Tensor) -> int:
    """Every token is drawn where the oracle's cumulative distribution allows it. Returns how many differ from its."""
    truncation = {name: value for name, value in given.items() if name != "u"}
    prob_YV = reference.draw_probs(logits_XV[torch.from_numpy(row_Y)], **truncation).double()
    high_YV = prob_YV.cumsum(dim=-1) / prob_YV.sum(dim=-1, keepdim=True)
    want_Y = reference.draw(logits_XV, row_Y, **given)
    for i, (token, u) in enumerate(zip(token_Y.tolist(), given["u"].tolist())):
        high = high_YV[i, token].item()
        low = high - (prob_YV[i, token] / prob_YV[i].sum()).item()
        assert low - NEAR <= u <= high + NEAR, f"row {i}: u={u} drew token {token} of [{low}, {high}), not {want_Y[i]}"
    return int((want_Y != token_Y).sum())


@pytest.mark.parametrize("vocab", [1, 5, 16, 63, 1000, 4099, 33_000])
@pytest.mark.parametrize("coarse", [False, True], ids=["smooth", "ties"])
def test_every_draw_equals_the_oracle(isa, vocab, coarse):
    rows = 200 if vocab < 5000 else 40
    logits_XV, given = make(rows, vocab, seed=vocab, coarse=coarse)
    row_Y = np.random.default_rng(1).permutation(rows)
    assert check(logits_XV, row_Y, given, draw(logits_XV, row_Y, **given)) <= rows // 50
    if isa == "scalar":  # what other devices use
        assert check(logits_XV, row_Y, given, draw_module.draw_with_torch(logits_XV, row_Y, given)) <= rows // 50


@pytest.mark.parametrize("flat", [0.0, 1e-3, 30.0], ids=["equal", "nearly equal", "peaked"])
def test_the_shape_of_the_distribution_does_not_matter(isa, flat):
    logits_XV, given = make(100, 2000, seed=3, spread=flat)
    given["min_p"] *= 0.99  # 1.0 would keep what rounds to the largest, which is not the same everywhere
    check(logits_XV, np.arange(100), given, draw(logits_XV, np.arange(100), **given))


def test_truncation_is_exact_among_equals(isa):
    num, vocab = 64, 700
    given = {
        "temperature": np.ones(num, np.float32),
        "min_p": np.zeros(num),
        "top_k": np.full(num, 9),
        "top_p": np.ones(num),
        "u": np.arange(num) / num,
    }
    drawn = draw(torch.zeros(num, vocab), np.arange(num), **given)
    assert drawn.tolist() == [i * 9 // num for i in range(num)]
    half = {**given, "top_k": np.zeros(num, np.int64), "top_p": np.full(num, 0.5)}
    drawn = draw(torch.zeros(num, vocab), np.arange(num), **half)
    assert drawn.tolist() == [i * (vocab // 2) // num for i in range(num)]


def test_no_draw_depends_on_other_rows_or_threads(isa):
    logits_XV, given = make(60, 1500, seed=9)
    together = draw(logits_XV, np.arange(60), **given).tolist()
    alone = [int(draw(logits_XV, np.array([i]), **{k: v[[i]] for k, v in given.items()})) for i in range(60)]
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 + num_threads)
        assert draw(logits_XV, np.arange(60), **given).tolist() == together == alone
    finally:
        torch.set_num_threads(num_threads)


def test_dropped_tokens_are_never_drawn_at_the_ends_of_u(isa):
    logits_XV = torch.full((2, 300), -1e4)
    logits_XV[:, 100:103] = torch.tensor([1.0, 2.0, 1.5])
    given = {
        "temperature": np.ones(2, np.float32),
        "min_p": np.zeros(2),
        "top_k": np.zeros(2, np.int64),
        "top_p": np.ones(2),
        "u": np.array([0.0, 1 - 2.0**-53]),
    }
    assert draw(logits_XV, np.arange(2), **given).tolist() == [100, 102]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_end_in_some_token(isa, bad):
    logits_XV, given = make(20, 100, seed=4)
    logits_XV[3] = bad
    logits_XV[5, 7] = bad
    token_Y = draw(logits_XV, np.arange(20), **given)
    assert ((token_Y >= 0) & (token_Y < 100)).all()
    fine = [i for i in range(20) if i not in (3, 5)]
    subset = {name: value[fine] for name, value in given.items()}
    assert token_Y[fine].tolist() == draw(logits_XV, np.array(fine), **subset).tolist()


def test_strided_logits_and_no_rows(isa):
    logits_XV, given = make(10, 64, seed=5)
    wide = torch.zeros(10, 100)
    wide[:, :64] = logits_XV
    want = draw(logits_XV, np.arange(10), **given).tolist()
    assert draw(wide[:, :64], np.arange(10), **given).tolist() == want
    assert draw(logits_XV.T.contiguous().T, np.arange(10), **given).tolist() == want
    none = {name: value[:0] for name, value in given.items()}
    assert draw(logits_XV, np.zeros(0, np.int64), **none).shape == (0,)


def test_a_block_boundary_of_the_oracle_changes_nothing(monkeypatch):
    logits_XV, given = make(50, 40, seed=6)
    whole = reference.draw(logits_XV, np.arange(50), **given).tolist()
    monkeypatch.setattr(draw_module, "_BLOCK_ELEMENTS", 7 * 40)
    assert draw_module.draw_with_torch(logits_XV, np.arange(50), given).tolist() == whole


def test_bad_arguments_are_named():
    logits_XV, given = make(4, 10, seed=7)
    with pytest.raises(ValueError, match=r"logits must be float32 \[rows, vocabulary\], got torch.float64"):
        draw(logits_XV.double(), np.arange(4), **given)
    with pytest.raises(ValueError, match=r"rows 1\.\.4 were asked for; there are 4"):
        draw(logits_XV, np.arange(1, 5), **given)
    with pytest.raises(ValueError, match=r"top_p has shape \(3,\), there are 4 rows"):
        draw(logits_XV, np.arange(4), **{**given, "top_p": given["top_p"][:3]})


@pytest.mark.parametrize("vocab", [1, 7, 64, 8192, 8193, 33_000])
def test_the_largest_is_the_first_of_equals_and_a_number(isa, vocab):
    logits_XV, _ = make(12, vocab, seed=vocab, coarse=True)
    logits_XV[1] = 2.5
    logits_XV[2, vocab // 2] = float("nan")
    logits_XV[3, vocab - 1] = float("inf")
    logits_XV[4] = -float("inf")
    logits_XV[5, : vocab // 2] = -float("inf")
    logits_XV[6] = float("nan")
    logits_XV[7, vocab // 3 :] = -3e38
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 5):
            torch.set_num_threads(num_threads)
            for rows in (logits_XV, logits_XV[3:4], logits_XV[::2], logits_XV[:0], logits_XV[:, : vocab // 2 + 1]):
                value_X, token_X = rows.max(dim=-1)
                assert torch.equal(largest(rows), torch.where(value_X.isfinite(), token_X, -1))
    finally:
        torch.set_num_threads(before)
