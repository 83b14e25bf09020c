"""Many sightings of one thing become one, with its members; what is not part of it stays."""

import numpy as np
import pytest
from eprt.diagnostics.detect.folding import (
    fold,
    join_nodes,
    without_explained,
    without_paths_of,
    without_wide_echoes,
)
from eprt.diagnostics.detect.sightings import Place, Sighting

NODE_N = np.repeat(np.arange(3), 4)


def column(rank: int, first: int = 2, last: int = 7, ratio: float = 2.0) -> Sighting:
    return Sighting(Place("column", rank, None, None), first, last, 9.0, ratio)


def point(src: int, dst: int) -> Sighting:
    return Sighting(Place("point", None, src, dst), 2, 7, 8.0, 3.0)


def path(first: int, second: int) -> Sighting:
    return Sighting(Place("path", None, None, None, (first, second)), 2, 7, 9.0, 2.0, True)


def never(sighting: Sighting) -> bool:
    return False


def node(number: int, ratio: float = 2.0) -> Sighting:
    return Sighting(Place("node", None, None, None, (number,)), 2, 7, 9.0, ratio, True)


def test_most_ranks_of_a_node_are_the_node():
    (folded,) = fold([column(4), column(5), column(7)], NODE_N)
    assert folded.place == Place("node", None, None, None, (1,)) and (folded.first, folded.last) == (2, 7)
    assert [member.rank for member in folded.members] == [4, 5, 7]


@pytest.mark.parametrize("kept", [[column(4), column(5)], [column(4), column(5, 0, 1), column(6, 9, 11)]])
def test_few_ranks_or_other_windows_stay_apart(kept):
    assert fold(kept, NODE_N) == kept


def test_one_node_is_never_folded():
    kept = [column(0), column(1), column(2)]
    assert fold(kept, np.zeros(4, dtype=int)) == kept


def test_links_between_two_nodes_are_a_path_and_links_inside_are_not():
    links = [point(0, 4), point(1, 5), point(4, 0), point(5, 1), point(2, 6), point(6, 2), point(3, 7), point(7, 3)]
    (folded,) = fold(links, NODE_N)
    assert folded.place.kind == "path" and folded.place.nodes == (0, 1) and len(folded.members) == 8
    inside = [point(0, 1), point(1, 2), point(2, 3), point(3, 0)]
    assert fold(inside, NODE_N) == inside


def test_two_nodes_that_wait_for_each_other_longest_are_a_path():
    def waits(sighting, pair):
        return (500.0, 380.0) if pair == (0, 2) else (160.0, 330.0)

    (joined,) = join_nodes([node(0), node(2)], [0, 1, 2], waits, never)
    assert joined.place.kind == "path" and joined.place.nodes == (0, 2)
    apart = [node(0), node(2)]
    assert join_nodes(apart, [0, 1, 2], lambda sighting, pair: (330.0, 330.0), never) == apart
    assert join_nodes(apart, [0, 1, 2], waits, lambda sighting: True) == apart, "no path makes ranks compute longer"


def test_a_node_that_computes_longer_explains_the_paths_to_it():
    slow, to_it, elsewhere = node(1), path(0, 1), path(0, 2)
    assert without_paths_of([slow, to_it, elsewhere], lambda sighting: sighting is slow) == [slow, elsewhere]
    assert without_paths_of([slow, to_it, elsewhere], never) == [slow, to_it, elsewhere]


def test_what_a_wide_finding_explains_goes_and_a_larger_fault_elsewhere_stays():
    elsewhere, part, less = column(0, ratio=5.0), column(5, ratio=5.0), column(1, ratio=1.5)
    wide = node(1)
    assert without_explained([wide, elsewhere, part, less], [wide], NODE_N) == [wide, elsewhere]


def test_one_very_late_rank_is_not_a_slow_node():
    late, echo = column(0, ratio=5.0), node(1)
    assert without_wide_echoes([late, echo], never, lambda wide, rank: wide.ratio) == [late]
    assert without_wide_echoes([late, echo], lambda wide: True, lambda wide, rank: wide.ratio) == [late, echo]


def test_what_is_usual_without_a_ranks_links_is_the_ranks_echo():
    late, echo = column(0, ratio=2.5), node(1)
    assert without_wide_echoes([late, echo], never, lambda wide, rank: 1.1) == [late]
    assert without_wide_echoes([late, echo], never, lambda wide, rank: 1.9) == [late, echo]
    less = column(0, ratio=1.8)
    assert without_wide_echoes([less, echo], never, lambda wide, rank: 1.1) == [less, echo]
