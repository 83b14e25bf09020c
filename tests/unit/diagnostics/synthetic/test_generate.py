"""Everything follows from the seed, and what cannot be made is refused."""

import numpy as np
import pytest
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate

from tests.unit.diagnostics.cases import late


@pytest.mark.parametrize("noise", ["lognormal", "gamma", "heavy", "autocorrelated", "arrivals"])
def test_the_same_job_is_the_same_again_and_another_seed_is_another_job(noise):
    first, again, other = (generate(SyntheticJob(4, 3, seed, noise, faults=(late(1),))) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first.wait_us_WNN, again.wait_us_WNN)
    assert (first.wait_us_WNN != other.wait_us_WNN).sum() >= 12 * 3 / 2


def test_what_is_not_known_is_refused_with_what_is():
    with pytest.raises(ValueError, match=r"noise='white': must be one of lognormal, gamma, .* or arrivals"):
        generate(SyntheticJob(noise="white"))
    with pytest.raises(ValueError, match="no fault row with cause comp: there are "):
        generate(SyntheticJob(faults=(PlantedFault("row", rank=1, cause="comp"),)))
