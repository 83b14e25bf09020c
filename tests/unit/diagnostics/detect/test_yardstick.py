"""Figures of a sighting over the usual: of its own windows, by median, without what is not known."""

import math

import numpy as np
import pytest
from eprt.diagnostics.detect.detector import detect
from eprt.diagnostics.detect.effects import START
from eprt.diagnostics.detect.sightings import Place, Sighting
from eprt.diagnostics.detect.yardstick import Yardstick
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate

from tests.unit.diagnostics.cases import late, link

N = 8


def column(rank: int, first: int = 0, last: int = 5, ratio: float = 2.0) -> Sighting:
    return Sighting(Place("column", rank, None, None), first, last, 9.0, ratio)


def point(src: int, dst: int, first: int = 0, last: int = 5, ratio: float = 2.0) -> Sighting:
    return Sighting(Place("point", None, src, dst), first, last, 9.0, ratio)


def yardstick(*faults: PlantedFault, **changes) -> Yardstick:
    matrices = generate(SyntheticJob(N, 6, 1, cv=0.05, faults=faults, **changes))
    return Yardstick(matrices, detect(matrices)[0])


def test_waits_and_what_of_them_is_more_than_usual():
    measured = yardstick(late(3, 2.0, windows=(2, 5)))
    assert measured.wait_us(column(3, 2)) == pytest.approx(200, rel=0.05)
    assert measured.wait_us(column(3, 0, 1)) == pytest.approx(100, rel=0.05)
    assert measured.excess_us(column(3, 2, ratio=2.0)) == pytest.approx(100, rel=0.05)
    assert measured.excess_us(column(3, 2, ratio=0.5)) == 0.0
    assert yardstick(link(2, 6, 5.0)).wait_us(point(2, 6)) == pytest.approx(500, rel=0.05)


def test_a_column_that_only_one_rank_tells_of():
    measured = yardstick()
    assert measured.only_waiter(column(3)) is None
    measured.matrices.dispatch_us_WNN[:, [0, 1, 2, 3, 4, 6, 7]] = np.nan
    assert measured.only_waiter(column(3)) == 5


def test_the_slowest_link_into_a_rank():
    measured = yardstick(link(2, 6, 5.0), link(2, 1, 4.0))
    (into,) = measured.links_into(column(2))
    assert into.place == Place("point", None, 2, 6) and into.ratio == pytest.approx(5, rel=0.1)
    assert measured.links_into(column(3)) == []


def test_own_tokens_are_compared_with_the_median_rank():
    measured = yardstick()
    assert measured.own_tokens(column(3)) == pytest.approx(1, abs=0.1)
    measured.matrices.sent_tokens_WNN[:, 3] *= 3
    assert measured.own_tokens(column(3)) == pytest.approx(3, rel=0.1)
    measured.matrices.sent_tokens_WNN[:, [0, 1, 2, 4]] = 0
    assert math.isinf(measured.own_tokens(column(3))), "half of the ranks are idle"
    measured.matrices.sent_tokens_WNN[:, 3] = np.nan
    assert measured.own_tokens(column(3)) == 1.0


def test_a_rank_is_compared_with_those_that_have_as_many_tokens():
    measured = yardstick(late(3, 4.0), late(5, 2.0))
    busy = np.isin(np.arange(N), (3, 5))
    measured.matrices.sent_tokens_WNN[:, ~busy] = 0
    assert measured.beyond_peers(column(3, ratio=4.0)) == pytest.approx(2.0, rel=0.1)
    measured.matrices.sent_tokens_WNN[:, 5] = 0
    assert measured.beyond_peers(column(3, ratio=4.0)) == 0.0, "nobody has as many"


def test_tokens_that_may_explain_a_wait():
    crowded = yardstick(PlantedFault("column", rank=3, cause="mixed", factor=3.0))
    assert crowded.tokens(column(3)) == pytest.approx(3, rel=0.1)
    assert crowded.tokens(column(4)) == pytest.approx(1, rel=0.1)
    assert yardstick(PlantedFault("point", src=2, dst=6, cause="mixed", factor=4.0)).tokens(point(2, 6)) > 3.6
    empty = yardstick()
    empty.matrices.recv_tokens_WNN[:] = 0.0
    assert empty.tokens(point(2, 6)) == 1.0


def test_compute_and_how_much_of_the_wait_it_makes_up():
    measured = yardstick(late(3, 2.0))
    assert measured.compute(column(3)) == pytest.approx(2, rel=0.1)
    assert measured.compute(point(1, 3)) == pytest.approx(2, rel=0.1), "of the awaited rank"
    assert measured.compute_share(column(3)) == pytest.approx(200 / 100, rel=0.1)
    assert measured.compute_share(point(1, 3)) == 0.0


def test_a_late_rank_is_spared_what_the_others_wait():
    measured = yardstick(late(3, 2.0))
    assert all(math.isnan(part) for part in measured.blocked(column(3))), "the log does not tell"
    measured.matrices.blocked_us_WN[:] = 300.0
    measured.matrices.blocked_us_WN[:, 3] = 200.0
    ratio, spared = measured.blocked(column(3))
    assert ratio == pytest.approx(2 / 3) and spared == pytest.approx(1, rel=0.1)


def test_a_late_ranks_row_is_low_and_a_slow_senders_is_not():
    ratio, z = yardstick(late(3, 2.0)).row(column(3))
    assert ratio == pytest.approx((0.5 + START) / (1 + START), rel=0.1) and z < -4
    for first in (0, 2):  # compared with the other ranks only, and with the windows before
        sender = PlantedFault("column", rank=3, factor=2.0, windows=(first, 5))
        ratio, z = yardstick(sender).row(column(3, first))
        assert ratio == pytest.approx(1, abs=0.1) and abs(z) < 3
    assert yardstick().row(point(1, 3)) == (1.0, 0.0)


def test_what_a_late_rank_adds_itself_and_what_it_inherits():
    def late_by(column_us: float, row_us: float, spared_us: float) -> tuple[float, float]:
        measured = yardstick()
        matrices, at = measured.matrices, slice(3, 6)
        matrices.blocked_us_WN[:] = 300.0
        matrices.blocked_us_WN[at, 3] -= spared_us
        matrices.dispatch_us_WNN[at, :, 3] += column_us
        matrices.dispatch_us_WNN[at, 3] += row_us
        return measured.own_lateness(column(3, 3))

    assert late_by(50, 0, 0) == pytest.approx((1.0, 0.5), abs=0.2), "its messages are late"
    assert late_by(50, -50, 50) == pytest.approx((1.0, 0.5), abs=0.2), "it works longer"
    assert late_by(50, -50, 0) == pytest.approx((0.0, 0.0), abs=0.2), "it was made late"


def test_what_it_adds_itself_without_a_past_and_where_it_is_not_logged():
    measured = yardstick(PlantedFault("column", 3, factor=2.0))
    measured.matrices.blocked_us_WN[:] = np.nan
    assert np.isnan(measured.own_lateness(column(3))).all()
    measured.matrices.blocked_us_WN[:] = 300.0
    part, over_usual = measured.own_lateness(column(3))
    assert part == pytest.approx(1, abs=0.2) and over_usual == pytest.approx(1, abs=0.2)


def test_a_row_that_the_ranks_own_shorter_work_explains():
    measured = yardstick()
    row = Sighting(Place("row", 3, None, None), 3, 5, 9.0, 2.0)
    assert math.isnan(measured.works_less(row)), "the log does not tell"
    measured.matrices.blocked_us_WN[:] = 300.0
    assert measured.works_less(row) == 0.0
    measured.matrices.blocked_us_WN[3:, 3] += measured.excess_us(row)
    assert measured.works_less(row) == pytest.approx(1.0)


def test_a_link_beside_its_tier_and_its_past():
    measured = yardstick(link(2, 6, 3.0, windows=(3, 5)))
    assert measured.beside_tier(point(2, 6, 3)) == pytest.approx((3.0, 3.0), rel=0.1)
    assert measured.beside_tier(point(2, 5, 3)) == pytest.approx((1.0, 1.0), rel=0.1)
    always = yardstick(link(2, 6, 3.0)).beside_tier(point(2, 6))
    assert always[0] == pytest.approx(3.0, rel=0.1) and math.isnan(always[1]), "no past"


def test_what_is_left_of_a_wide_place_without_a_rank():
    measured = yardstick(
        *(PlantedFault("column", rank=rank, factor=3.0, windows=(3, 5)) for rank in (4, 5)), ranks_per_node=4
    )
    node = Sighting(Place("node", None, None, None, (1,)), 3, 5, 9.0, 2.0, True)
    assert measured.ratio_without(node, 0) > 1.4
    assert measured.ratio_without(node, 4) == pytest.approx(1.0, abs=0.1)
    alone = yardstick(ranks_per_node=7)
    assert alone.ratio_without(node, 7) == 1.0, "nothing is left"
