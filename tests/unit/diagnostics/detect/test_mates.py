"""Ranks that are late with a late rank of their node make it a late node; a rank that is late alone stays a rank."""

import pytest
from eprt.diagnostics import Report
from eprt.diagnostics.detect.mates import fold_with_mates
from eprt.diagnostics.detect.sightings import Place, Sighting
from eprt.diagnostics.detect.yardstick import Yardstick

from benchmarks.diagnosis.serving_job import ServingFault, ServingJob, play_records

NODES = (0, 0, 1, 1, 2, 2, 3, 3)


def report(family: str, seed: int, fault: ServingFault) -> Report:
    return Report.of_records(play_records(ServingJob(8, family, seed, node_of_rank=NODES, fault=fault)))


@pytest.mark.parametrize(("seed", "node"), [(50003, 3), (50006, 2), (50011, 3), (50012, 2)])
def test_a_late_node_of_two_ranks_is_told_where_noise_hides_one_of_them(seed, node):
    """One of its ranks used to be told alone."""
    (finding,) = report("heavy", seed, ServingFault("node comm", 2.0, (node,))).findings
    assert (finding.kind, finding.nodes, finding.cause) == ("node", (node,), "comm")
    assert sorted(member["rank"] for member in finding.members) == [2 * node, 2 * node + 1]


@pytest.mark.parametrize("kind", ["column comm", "column comp"])
@pytest.mark.parametrize("family", ["steady", "heavy"])
def test_a_late_rank_stays_a_rank(family, kind):
    (finding,) = report(family, 50006, ServingFault(kind, 3.0, (6,))).findings
    assert (finding.kind, finding.rank) == ("column", 6)


def test_mates_are_no_findings_by_themselves():
    found = report("steady", 50001, ServingFault("node comm", 3.0, (1,)))
    yardstick, given = Yardstick(found.matrices, found.outliers), []
    column = Sighting(Place("column", 2, None, None), 4, 11, 6.0, 3.0)

    def keep(sightings: list[Sighting]) -> list[Sighting]:
        given.extend(sightings)
        return sightings

    assert fold_with_mates([column], yardstick, keep) == [column]
    assert [s.place.rank for s in given] == [2, 3], "only its own node's ranks, each once"
    assert fold_with_mates([Sighting(column.place, 0, 11, 6.0, 3.0)], yardstick, keep)[0].place == column.place
    assert len(given) == 3, "without a past nobody is known to be late with it"
