"""Rejection sampling of drafts: tokens follow the model's distribution, and drafts hold as often as they can."""

from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from eprt import LLM, SamplingParams
from eprt.engine import philox, sampler
from eprt.engine.acceptance import Acceptance
from eprt.engine.batch_rows import BatchRows
from eprt.engine.request import Request
from eprt.engine.schedule import Drafts
from tests import reference_ops as reference

MODEL = Path(__file__).resolve().parents[3] / "examples" / "demo_model" / "checkpoint"
VOCAB, ROWS = 12, 40_000
SURELY_WRONG = 1e-6  # such a p-value does not come by chance


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Of Pearson's chi-square test; both are counts by category, none expected below 5."""
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2.0), torch.tensor(statistic / 2.0)).item()


def fits(token_X: torch.Tensor, prob_V: torch.Tensor) -> float:
    counts, expected = np.bincount(token_X.numpy(), minlength=VOCAB), prob_V.numpy() * len(token_X)
    assert not counts[expected == 0].any(), "a token that truncation drops was drawn"
    kept = expected >= 5
    return p_value(counts[kept], expected[kept])


def distribution(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    one = {"temperature": np.float32, "min_p": np.float64, "top_k": np.int64, "top_p": np.float64}
    given = {name: np.array([getattr(params, name)], dtype=dtype) for name, dtype in one.items()}
    prob_V = reference.draw_probs(logits_V[None], **given)[0].double()
    return prob_V / prob_V.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=7),
        SamplingParams(temperature=1.5, top_p=0.8, min_p=0.02),
    ],
)
@pytest.mark.parametrize("k", [0, 1])
def test_tokens_follow_the_models_distribution(params, k):
    rows = BatchRows(ROWS, 8, 4, VOCAB, num_drafts=2)
    for seed in range(ROWS):
        options = {"sample_idx": 0, "seed": seed, "max_model_len": 8, "eos_token_ids": ()}
        rows.assign_row(Request.new(str(seed), [1, 2], params, **options))
    row_S = np.arange(ROWS)
    token_MK = torch.zeros(ROWS, 2, dtype=torch.int64)
    acceptance = Acceptance(rows, token_MK)
    generator = torch.Generator().manual_seed(3 + k)
    p_V, q_V = (torch.randn(VOCAB, generator=generator) * 1.5 for _ in range(2))
    token_MK[:, k] = draft_S = acceptance.draw_drafts(
        q_V.expand(ROWS, VOCAB).clone(),
        torch.zeros(ROWS, dtype=torch.int64),
        row_S,
        k,
        torch.zeros(ROWS, dtype=torch.int64),
    )
    q, p = distribution(q_V, params), distribution(p_V, params)
    assert fits(draft_S, q) > SURELY_WRONG

    position_S = np.full(ROWS, k, dtype=np.uint64)
    u_S = philox.uniform(np.arange(ROWS, dtype=np.uint64), np.zeros(ROWS, np.uint64), position_S)
    token_S = acceptance.accept_or_redraw(p_V.expand(ROWS, VOCAB).clone(), row_S, np.full(ROWS, k), position_S, u_S)
    assert fits(token_S, p) > SURELY_WRONG
    if not (draft_S.bincount(minlength=VOCAB)[p == 0]).any():
        assert fits(draft_S, p) < SURELY_WRONG, "the drafts alone would pass too: the test proves nothing"
    held, most = (token_S == draft_S).double().mean().item(), torch.minimum(p, q).sum().item()
    assert abs(held - most) < 5 * (most * (1 - most) / ROWS) ** 0.5


def chains(num_rows: int, num_tokens: int, p_VV: torch.Tensor, q_VV: torch.Tensor, num_drafts: int) -> np.ndarray:
    """[rows, num_tokens]: what a model gives whose logits depend on the token before, and drafts on it likewise."""
    rows, row_S = BatchRows(num_rows, 32, 4, len(p_VV), num_drafts), np.arange(num_rows)
    for seed in range(num_rows):
        options = {"sample_idx": 0, "seed": seed, "max_model_len": 32, "eos_token_ids": ()}
        rows.assign_row(Request.new(str(seed), [0], SamplingParams(temperature=1.0), **options))
    token_MK, num = torch.zeros(num_rows, num_drafts, dtype=torch.int64), 0
    acceptance = Acceptance(rows, token_MK)
    while rows.length_M.min() <= num_tokens:
        last_S = torch.from_numpy(rows.tokens_ML[row_S, rows.length_M - 1]).long()
        before_X = torch.cat([last_S[:, None], token_MK[:, :num]], dim=1).reshape(-1)
        offset_X, row_X = np.tile(np.arange(num + 1), num_rows), np.repeat(row_S, num + 1)
        drafts = Drafts(offset_X, offset_X < num) if num else None
        sample = sampler.launch(p_VV[before_X], row_X, rows, drafts=drafts, acceptance=acceptance)
        token_SK = sample.token_X.reshape(num_rows, num + 1)
        held_S = (token_SK[:, :num] == token_MK[:, :num]).long().cumprod(dim=1).sum(dim=1)
        for j in range(num + 1):  # what lies behind a draft that failed is written again
            rows.tokens_ML[row_S, rows.length_M + j] = token_SK[:, j].numpy()
        token_S = token_SK.gather(1, held_S[:, None]).squeeze(1)
        for k in range(num_drafts):
            token_S = acceptance.draw_drafts(q_VV[token_S], torch.zeros_like(token_S), row_S, k, 1 + held_S)
            token_MK[:, k] = token_S
        rows.length_M += 1 + held_S.numpy()
        rows.length_M = rows.length_M.clip(max=1 + num_tokens + num_drafts)  # those ahead wait for the others
        num = num_drafts
    return rows.tokens_ML[:, 1 : 1 + num_tokens]


def test_whole_chains_of_drafts_follow_the_models_distribution():
    """Four tokens in a row, of three: what was drafted, failed and is drafted again leaves no trace in any of them."""
    generator, num_rows, num_tokens = torch.Generator().manual_seed(5), 30_000, 4
    p_VV, q_VV = (torch.randn(3, 3, generator=generator) * 1.5 for _ in range(2))
    token_SN = chains(num_rows, num_tokens, p_VV, q_VV, num_drafts=3)
    prob_VV, expected = p_VV.double().softmax(dim=-1).numpy(), {}
    for chain in product(range(3), repeat=num_tokens):
        expected[chain] = num_rows * np.prod([prob_VV[a, b] for a, b in pairwise((0, *chain))])
    counts = Counter(map(tuple, token_SN.tolist()))
    common = [chain for chain, count in expected.items() if count >= 5]
    assert len(common) > 60
    observed, wanted = (np.array([count[chain] for chain in common], float) for count in (counts, expected))
    assert (
        p_value(np.append(observed, num_rows - observed.sum()), np.append(wanted, num_rows - wanted.sum()))
        > SURELY_WRONG
    )


def sampled(**options) -> tuple[Counter, float]:
    """How often each pair of second and third tokens comes after one prompt, and how many drafts held."""
    pairs: Counter = Counter()
    with LLM(MODEL, kv_cache_gb=0.02, max_num_seqs=128, **options) as llm:
        for seed in range(7):
            params = SamplingParams(max_tokens=4, temperature=1.3, seed=seed, n=128, ignore_eos=True)
            (output,) = llm.generate(["Count from 3 to"], params)
            pairs.update(tuple(completion.token_ids[1:3]) for completion in output.outputs)
        stats = llm.engine.stats()
        llm.engine.check_integrity()
    return pairs, stats.num_accepted_tokens / max(stats.num_drafted_tokens, 1)


def test_a_model_with_drafts_gives_the_same_distribution_and_more_of_them_hold():
    without, _ = sampled()
    _, exact = sampled(num_speculative_tokens=2)
    drafted, rejection = sampled(num_speculative_tokens=2, speculative_acceptance="rejection")
    assert rejection > exact + 0.03
    common = [pair for pair, count in without.items() if count + drafted[pair] >= 20]
    rare = [sum(count for pair, count in counts.items() if pair not in common) for counts in (without, drafted)]
    a, b = (np.array([*(counts[pair] for pair in common), other]) for counts, other in zip((without, drafted), rare))
    assert len(common) >= 8 and a.sum() == b.sum()
    # Two samples of equal size: the mean is what either expects, and deviations from it halve the statistic.
    mean = (a + b) / 2
    statistic = ((a - mean) ** 2 / mean).sum() + ((b - mean) ** 2 / mean).sum()
    degrees = torch.tensor((len(a) - 1) / 2.0)
    assert torch.special.gammaincc(degrees, torch.tensor(statistic / 2.0)).item() > SURELY_WRONG


def test_greedy_requests_are_not_changed():
    texts, params = ["What is 12 + 30?", "Sort: pear, fig, apple"], SamplingParams(max_tokens=30, temperature=0)
    tokens = []
    for options in ({}, {"num_speculative_tokens": 3, "speculative_acceptance": "rejection"}):
        with LLM(MODEL, kv_cache_gb=0.02, **options) as llm:
            tokens.append([output.outputs[0].token_ids for output in llm.generate(texts, params)])
    assert tokens[0] == tokens[1]


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="--speculative-acceptance often: must be exact or rejection"):
        LLM(MODEL, speculative_acceptance="often")
