"""The benchmark of the scheduler steps a real engine over a model without work."""

import pytest

from benchmarks.serving.bench_scheduler import measure
from eprt.engine.sampling_params import SamplingParams


@pytest.mark.parametrize("churn", [False, True])
def test_every_step_is_timed(churn):
    own_s, sample_s = measure(SamplingParams(max_tokens=4000, temperature=0), 1, churn, num_steps=4)
    assert len(own_s) == len(sample_s) == 4
    assert min(own_s) > 0 and min(sample_s) > 0
