"""Faults that are wider than a rank: one finding each, against the run's own past or a saved baseline."""

import numpy as np
import pytest
from eprt.diagnostics import Report
from eprt.diagnostics.detect.chance import Chance
from eprt.diagnostics.detect.topology import BETWEEN_ALL, LinkTopology
from eprt.diagnostics.detect.wide import find_wide
from eprt.diagnostics.mutes import JobPlaces, place_of
from eprt.diagnostics.windows.baseline import Baseline

from benchmarks.diagnosis.bench_serving_faults import ServingCase
from benchmarks.diagnosis.serving_job import ServingFault, ServingJob, play_records

FOUR_NODES = tuple(np.repeat(np.arange(4), 4).tolist())
TWO_NODES = tuple(np.repeat(np.arange(2), 4).tolist())
FAULTS = [
    (ServingFault("job", 3.0), "job", (), "comp"),
    (ServingFault("tier", 4.0), "tier", (), "comm"),
    (ServingFault("node comp", 2.0, (2,)), "node", (2,), "comp"),
    (ServingFault("node comm", 2.0, (1,)), "node", (1,), "comm"),
    (ServingFault("path", 3.0, (1, 3)), "path", (1, 3), "comm"),
]


def report(nodes: tuple[int, ...], fault: ServingFault | None, seed: int = 1, **compared) -> Report:
    job = ServingJob(len(nodes), "steady", seed, node_of_rank=nodes, fault=fault)
    return Report.from_matrices(Report.of_records(play_records(job)).matrices, **compared)


@pytest.mark.parametrize(("fault", "kind", "nodes", "cause"), FAULTS)
def test_one_fault_is_one_finding(fault, kind, nodes, cause):
    """A slow path between two nodes used to be 84 to 91 findings, a slow job none."""
    (finding,) = report(FOUR_NODES, fault).findings
    assert (finding.kind, finding.nodes, finding.cause) == (kind, nodes, cause)
    assert 3 <= finding.first_window <= 5 and finding.last_window == 11
    assert (finding.tier == "between nodes") == (kind == "tier") and finding.rank is None


@pytest.mark.parametrize(("fault", "kind", "nodes", "cause"), FAULTS[:2])
def test_a_run_that_was_slow_from_the_start_needs_a_baseline(fault, kind, nodes, cause):
    always = ServingFault(fault.kind, fault.factor, fault.place, windows=(0, 11))
    assert report(FOUR_NODES, always).findings == ()
    baseline = Baseline.from_matrices(report(FOUR_NODES, None, seed=2).matrices)
    (finding,) = report(FOUR_NODES, always, baseline=baseline).findings
    assert (finding.kind, finding.first_window) == (kind, 0)
    assert report(FOUR_NODES, None, seed=3, baseline=baseline).findings == ()


@pytest.mark.parametrize("seed", [50000, 50005, 50006])
def test_links_between_all_nodes_are_one_finding_where_racks_were_learned(seed):
    """Noise that stays looked like racks, so no tier was the slowest, and all four nodes were told."""
    job = ServingCase("autoregressive", 8, "tier", 4.0).job(seed)
    (finding,) = Report.of_records(play_records(job)).findings
    assert (finding.kind, finding.tier, finding.cause) == ("tier", BETWEEN_ALL, "comm")
    assert "waits between all nodes are" in finding.evidence and len(finding.members) == 12
    JobPlaces(8, frozenset(job.node_of_rank)).check(place_of(finding.to_json()))


def test_the_only_fabric_of_two_nodes():
    (finding,) = report(TWO_NODES, ServingFault("tier", 3.0)).findings
    assert (finding.kind, finding.nodes) == ("path", (0, 1))


def test_a_rank_that_is_far_later_than_a_slow_job_is_told_beside_it():
    """Its column used to be taken for a part of the job: its experts compute longer than before, too."""
    matrices = report((0,) * 8, ServingFault("job", 3.0)).matrices
    for waits_WNN in (matrices.dispatch_us_WNN, matrices.combine_us_WNN):
        waits_WNN[6:, :, 3] *= 14
    matrices.compute_us_WN[6:, 3] *= 2
    found = {(finding.kind, finding.rank) for finding in Report.from_matrices(matrices).findings}
    assert found == {("job", None), ("column", 3)}


def test_most_ranks_slow_is_the_job_and_the_others_are_not_early():
    job = ServingJob(16, "steady", 4)
    found = Report.of_records(play_records(job)).matrices
    found.compute_us_WN[4:, :10] *= 3
    found.combine_us_WNN[4:, 10:, :10] += 200
    report = Report.from_matrices(found)
    (finding,) = report.findings
    assert (finding.kind, finding.cause) == ("job", "comp") and report.early == ()
    assert [member["rank"] for member in finding.members] == list(range(10)) and "10 of 16 ranks" in finding.evidence


def test_more_tokens_are_load_and_no_fault():
    found = report(FOUR_NODES, ServingFault("job", 3.0)).matrices
    found.recv_tokens_WNN[4:] *= 3
    assert Report.from_matrices(found).findings == ()


def test_noise_that_stays_on_a_few_links_is_no_slow_path():
    nodes = tuple(np.repeat(np.arange(8), 2).tolist())  # four links from one node to another
    for seed in (5, 22):
        job = ServingJob(16, "autoregressive", seed, node_of_rank=nodes)
        found = Report.of_records(play_records(job))
        topology = LinkTopology.from_nodes(found.matrices.node_of_rank_N)
        links = Chance.from_links(found.outliers.links()[1])
        assert find_wide(found.matrices, topology), "if it did not stay, it would be one"
        assert find_wide(found.matrices, topology, links=links) == [] and found.findings == ()


@pytest.mark.parametrize(
    ("nodes", "far"),
    [
        (FOUR_NODES, [(a, 3) for a in range(3)]),
        (tuple(np.repeat(np.arange(8), 2).tolist()), [(a, b) for a in range(6) for b in (6, 7)]),
    ],
)
def test_racks_of_three_and_one_and_of_six_and_two_are_no_fault(nodes, far):
    for seed in range(3):
        job = ServingJob(16, "steady", seed, node_of_rank=nodes, slow_pairs=tuple(far))
        assert Report.of_records(play_records(job)).findings == ()
