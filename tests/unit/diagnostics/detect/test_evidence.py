"""Causes from figures, and the words for them."""

import math

import pytest
from eprt.diagnostics.detect.detector import detect
from eprt.diagnostics.detect.evidence import ADVICE, Evidence
from eprt.diagnostics.detect.sightings import Place, Sighting
from eprt.diagnostics.detect.yardstick import Yardstick
from eprt.diagnostics.synthetic import FAULT_KINDS, SyntheticJob, generate

from tests.unit.diagnostics.cases import late

PLACES = {
    "column": Place("column", 3, None, None),
    "row": Place("row", 3, None, None),
    "point": Place("point", None, 2, 6),
}


def evidence(kind: str = "column", ratio: float = 2.0, **figures) -> Evidence:
    usual = {
        "wait_us": 200.0,
        "row_ratio": 1.0,
        "row_z": 0.0,
        "compute_ratio": 1.0,
        "compute_share": 0.0,
        "token_ratio": 1.0,
        "blocked_ratio": math.nan,
        "spared": math.nan,
        "seen": "in all windows",
    }
    return Evidence(Sighting(PLACES[kind], 0, 5, 9.0, ratio), **{**usual, **figures})


@pytest.mark.parametrize(
    ("kind", "figures", "cause"),
    [
        ("column", {}, "comm"),
        ("column", {"row_ratio": 0.6, "row_z": -5.0}, "comp"),
        ("column", {"row_ratio": 0.6, "row_z": -1.0}, "comm"),
        ("column", {"compute_ratio": 1.3}, "comp"),
        ("column", {"compute_ratio": 1.3, "spared": 0.1}, "comm"),
        ("column", {"compute_ratio": 1.3, "spared": 0.1, "compute_share": 0.6}, "comp"),
        ("column", {"spared": 0.6}, "comp"),
        ("column", {"row_ratio": 0.6, "row_z": -5.0, "spared": 0.1}, "comm"),
        ("column", {"token_ratio": 1.5}, "mixed"),
        ("column", {"token_ratio": 1.5, "ratio": 3.0}, "comm"),
        ("column", {"token_ratio": 1.2, "ratio": 1.3}, "comm"),
        ("row", {}, "comm"),
        ("row", {"compute_ratio": 0.7}, "comp"),
        ("row", {"token_ratio": 2.0}, "mixed"),
        ("point", {}, "comm"),
        ("point", {"compute_ratio": 3.0, "row_ratio": 0.1, "row_z": -9.0}, "comm"),
        ("point", {"token_ratio": 2.0}, "mixed"),
    ],
)
def test_the_cause_follows_from_the_figures(kind, figures, cause):
    assert evidence(kind, **figures).cause() == cause


@pytest.mark.parametrize(("kind", "cause"), [*FAULT_KINDS, ("row", "comp")])
def test_every_cause_has_its_advice(kind, cause):
    assert len(ADVICE[kind, cause]) > 40 and len({ADVICE[one] for one in FAULT_KINDS}) == len(FAULT_KINDS)


def test_the_words_hold_the_figures():
    column = evidence(row_ratio=0.5, compute_ratio=2.0, token_ratio=1.1).text()
    assert column == (
        "the others wait 2x as long for rank 3 as for its peers (200 us per call) in all windows; of the usual, "
        "rank 3 computes 2x, itself waits 0.5x, has 1.1x the tokens"
    )
    assert ", itself waits 0.7x, " in evidence(row_ratio=0.5, blocked_ratio=0.7).text()
    assert evidence("row").text().startswith("rank 3 waits 2x as long as its peers, for everyone (200 us per call)")
    point = evidence("point", token_ratio=4.0).text()
    assert point.startswith("rank 2 waits 2x as long for rank 6 as both ends explain")
    assert point.endswith("rank 6 computes 1x, the link carries 4x the tokens")


@pytest.mark.parametrize(
    ("num_windows", "first", "last", "seen"),
    [
        (1, 0, 0, "in the only window"),
        (8, 0, 7, "in all windows"),
        (8, 2, 4, "in 3 of 8 windows, from 20 s to 50 s, then recovered"),
        (8, 5, 7, "in 3 of 8 windows, from 50 s to the end"),
    ],
)
def test_it_says_when(num_windows, first, last, seen):
    matrices = generate(SyntheticJob(8, num_windows, faults=(late(3),)))
    yardstick = Yardstick(matrices, detect(matrices)[0])
    gathered = Evidence.gather(yardstick, Sighting(PLACES["column"], first, last, 9.0, 3.0))
    assert gathered.seen == seen and gathered.cause() == "comp" and gathered.compute_ratio > 2.5
