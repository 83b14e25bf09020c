"""Sightings: when two are of the same time, and how the places of the matrices are listed."""

import numpy as np
import pytest
from eprt.diagnostics.detect.runs import WindowRun
from eprt.diagnostics.detect.sightings import Outliers, Place, Sighting, sightings_of, without_twins


def sighting(first: int, last: int) -> Sighting:
    return Sighting(Place("column", 1, None, None), first, last, 9.0, 2.0)


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ((0, 9), (5, 14), True),
        ((0, 9), (6, 15), False),
        ((0, 9), (9, 9), True),
        ((0, 9), (9, 10), True),
        ((0, 9), (9, 11), False),
        ((0, 3), (4, 7), False),
    ],
)
def test_two_overlap_in_at_least_half_of_the_shorter_run(one, other, overlap):
    assert sighting(*one).overlaps(sighting(*other)) == sighting(*other).overlaps(sighting(*one)) == overlap


def test_of_twins_the_first_is_kept():
    one, twin, later = sighting(0, 5), sighting(1, 5), sighting(8, 9)
    assert without_twins([one, twin, later]) == [one, later]


def test_links_are_the_points_without_the_diagonal():
    column_WN, point_WNN = np.zeros((2, 3)), np.arange(18.0).reshape(2, 3, 3)
    outliers = Outliers(column_WN, column_WN, column_WN, column_WN, point_WNN, -point_WNN)
    pairs_P2, z_WP, ratio_WP = outliers.links()
    assert pairs_P2.tolist() == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]]
    assert z_WP.tolist() == [[1, 2, 3, 5, 6, 7], [10, 11, 12, 14, 15, 16]] and (ratio_WP == -z_WP).all()


def test_runs_become_sightings_of_their_places():
    values = [np.full((2, 3), k) for k in range(4)], [np.full((2, 3, 3), k) for k in (4, 5)]

    def find_runs(z_WP, ratio_WP, is_point):
        assert z_WP.shape == ((2, 6) if is_point else (2, 3))
        yield WindowRun(place=2, first=0, last=1, score=float(z_WP[0, 0])), float(ratio_WP[0, 0])

    found = list(sightings_of(Outliers(*values[0], *values[1]), find_runs))
    assert [tuple(s.place)[:4] for s in found] == [
        ("column", 2, None, None),
        ("row", 2, None, None),
        ("point", None, 1, 0),
    ]
    assert [(s.first, s.last, s.score, s.ratio) for s in found] == [(0, 1, 0, 1), (0, 1, 2, 3), (0, 1, 4, 5)]
