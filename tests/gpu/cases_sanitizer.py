"""What every rank does under compute-sanitizer: a little of everything that the kernels do."""

from eprt.ep.group.group import EPGroup
from tests.gpu import (
    cases_indexer,
    cases_low_latency,
    cases_low_latency_signals,
    cases_mla,
    cases_mla_fp8,
    cases_normal,
    cases_normal_rows,
)
from tests.gpu.cases_mla import Case
from tests.gpu.draw import Draw
from tests.prompts import Prompts


def small(group: EPGroup) -> None:
    """Low latency, fused and by single calls, with and without signals; normal mode by token and by expert."""
    cases_low_latency.many_epochs(group, num_steps=2)
    for exact in (False, True):
        cases_low_latency_signals.tile_signals(group, exact=exact)
    cases_normal_rows.many_row_epochs(group, num_steps=3)
    cases_normal.many_epochs(group, num_steps=2)


_LATENT_CASES = (Case(128, [0, 700, 1, 3000]), Case(128, [300, 70], 16, [2, 3]), Case(16, [1, 2000], 256))


def latent_attention(group: EPGroup) -> None:
    """Whole, cut, empty and causal requests; one and two thread blocks a cluster; boxes of 64 and 16 rows."""
    cases_mla.check_all(_LATENT_CASES, Draw("cuda"))


def fp8_latent_attention(group: EPGroup) -> None:
    """The same over an fp8 cache."""
    cases_mla_fp8.check_all(_LATENT_CASES, Draw("cuda"))


def prompt_attention(group: EPGroup) -> None:
    """Several tiles a thread block takes one after the other, tails, an empty request, one tile of one row."""
    for case in (([5, 0, 200, 129, 1], [200, 3, 200, 300, 6], 3), ([700], [700], 40)):
        Prompts.draw(Draw("cuda"), *case).attend(2)


def sparse_choices(group: EPGroup) -> None:
    """One and several thread blocks for a row, lengths around a thread block's share, every kind of scores."""
    cases_indexer.choices_by_their_own_kernel(Draw("cuda"), ((7, 9000), (1, 40000)), (2048, 33))


def sparse_scores(group: EPGroup) -> None:
    """Decodes of one and three rows a request, a prompt whose rows fill a tile and a tail, pages of 16 and 64."""
    decodes, prompt = [(b, 200 + 300 * b - t) for b in range(3) for t in (2, 1, 0)], [(0, x) for x in range(280, 301)]
    cases_indexer.scores_by_their_own_kernel(Draw("cuda"), ((64, decodes), (16, [(1, 90), (2, 0)]), (64, prompt)))


def gathered_attention(group: EPGroup) -> None:
    """Attention to listed tokens: entries that lie anywhere, of bfloat16 and fp8, by 16 and 128 heads."""
    listed = [Case(heads, [65, 0, 1, 700], 1) for heads in (16, 128)]
    cases_mla.check_all(listed, Draw("cuda"))
    cases_mla_fp8.check_all(listed, Draw("cuda"))
