"""Why a rank is late, by its usage: quota, cores, the GPU's clock, long contexts; and nothing without proof."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from eprt.diagnostics import Finding, Report

from tests.unit.diagnostics.cases import late, synthetic_records

LATE = 3
# 5800 calls in 10 s; the others wait some 100 us a call for a rank, and 300 for this one.
USUAL = {
    "cpu_us": 5e6,
    "run_wait_us": 1e4,
    "throttled_us": 0.0,
    "attention_us": 1e6,
    "tokens": 1000,
    "context_tokens": 5e5,
    "gpu_mcycles": 18_000.0,
    "gpu_thermal_us": 0.0,
    "gpu_power_us": 0.0,
}


def finding_with(of_late: Mapping[str, float], usual: Mapping[str, float] = USUAL) -> Finding:
    records = synthetic_records(8, 8, faults=[replace(late(LATE), cause="comm")])
    told = [replace(r, usage={**usual, **(of_late if r.rank == LATE else {})}) for r in records]
    (finding,) = [f for f in Report.of_records(told).findings if f.kind == "column"]
    assert finding.rank == LATE
    return finding


@pytest.mark.parametrize(
    ("usage", "cause", "words"),
    [
        ({"throttled_us": 4e6}, "comp", "a quota of its cgroup stopped it for 40 % of the time"),
        ({"run_wait_us": 3e6}, "comp", "it was ready to run and had no core for 30 % of the time"),
        ({"gpu_mcycles": 9000.0}, "comp", "its GPU's clock is at 0.5x the usual"),
        ({"gpu_thermal_us": 6e6, "gpu_mcycles": 9000.0}, "comp", "lowered for heat for 60 % of the time"),
        ({"gpu_power_us": 6e6}, "comp", "lowered for a limit of power for 60 % of the time"),
        ({"attention_us": 4e6}, "comp", "its attention takes 4x as long for 1x the context"),
        ({"attention_us": 4e6, "context_tokens": 2e6}, "mixed", "it reads 4x the context for 1x the tokens"),
        ({"attention_us": 4e6, "tokens": 3000}, "mixed", "for 3x the tokens"),
    ],
)
def test_what_held_the_rank_up_is_its_cause(usage, cause, words):
    finding = finding_with(usage)
    assert finding.cause == cause and words in finding.evidence, finding.evidence


@pytest.mark.parametrize(
    "usage", [{}, {"throttled_us": 1e5}, {"run_wait_us": 2e5}, {"attention_us": 1.2e6}, {"gpu_mcycles": 17_500.0}]
)
def test_little_of_it_proves_nothing(usage):
    finding = finding_with(usage)
    assert finding.cause == "comm" and "quota" not in finding.evidence and "attention" not in finding.evidence


@pytest.mark.parametrize(("throttled_us", "cause"), [(8e6, "comp"), (12e6, "comp"), (1e5, "mixed")])
def test_a_quota_that_makes_up_the_wait_comes_before_more_tokens(throttled_us, cause):
    records = synthetic_records(8, 8, faults=[replace(late(LATE), cause="mixed")])
    told = [replace(r, usage={**USUAL, "throttled_us": throttled_us if r.rank == LATE else 0.0}) for r in records]
    (finding,) = Report.of_records(told).findings
    assert finding.cause == cause, finding.evidence
    assert ("quota" in finding.evidence) == (cause == "comp") and "120 %" not in finding.evidence


def test_what_all_ranks_have_alike_is_no_reason():
    assert finding_with({}, {**USUAL, "throttled_us": 4e6, "run_wait_us": 4e6}).cause == "comm"


def test_a_rank_that_does_not_tell_is_not_judged():
    records = synthetic_records(8, 8, faults=[replace(late(LATE), cause="comm")])
    told = [replace(r, usage=None if r.rank == LATE else USUAL) for r in records]
    assert [f.cause for f in Report.of_records(told).findings] == ["comm"]
    assert not np.isnan([f.score for f in Report.of_records(told).findings]).any()
