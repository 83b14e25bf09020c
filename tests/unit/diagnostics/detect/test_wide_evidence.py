"""What a wide finding says: how much, since when, of whom, and why."""

import numpy as np
from eprt.diagnostics import Report

from benchmarks.diagnosis.serving_job import ServingFault, ServingJob, play_records

NODES = tuple(np.repeat(np.arange(4), 4).tolist())


def finding_of(fault: ServingFault):
    job = ServingJob(16, "steady", 1, node_of_rank=NODES, fault=fault)
    (finding,) = Report.of_records(play_records(job)).findings
    return finding


def test_the_ranks_of_a_slow_node_are_named_with_its_cause():
    finding = finding_of(ServingFault("node comp", 2.0, (2,)))
    assert "the ranks of node 2" in finding.evidence and "from 40 s to the end" in finding.evidence
    assert finding.cause == "comp" and "one node arrive late" in finding.advice


def test_a_path_is_the_network_s_whatever_its_nodes_compute():
    finding = finding_of(ServingFault("path", 3.0, (0, 3)))
    assert "between nodes 0 and 3" in finding.evidence and finding.cause == "comm" and "route" in finding.advice


def test_a_tier_is_named_in_words():
    finding = finding_of(ServingFault("tier", 4.0))
    assert "waits between nodes are" in finding.evidence and "as long as before" in finding.evidence
