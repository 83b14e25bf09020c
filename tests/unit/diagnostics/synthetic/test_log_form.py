"""Records of a synthetic job are its matrices, up to the rounding of the log."""

import numpy as np
import pytest
from eprt.diagnostics import read_log
from eprt.diagnostics.synthetic import SyntheticJob, generate, records_of

from tests.unit.diagnostics.cases import matrices_of, write_records


@pytest.mark.parametrize("noise", ["lognormal", "arrivals"])
def test_records_are_the_matrices(noise, tmp_path):
    matrices = generate(SyntheticJob(4, 3, noise=noise, ranks_per_node=2))
    records = records_of(matrices)
    again = matrices_of(records)
    for name in ("window_W", "start_s_W", "end_s_W", "node_of_rank_N", "calls_WN"):
        np.testing.assert_array_equal(getattr(again, name), getattr(matrices, name))
    for name in ("dispatch_us_WNN", "combine_us_WNN", "compute_us_WN", "blocked_us_WN"):
        np.testing.assert_allclose(getattr(again, name), getattr(matrices, name), atol=1e-4)
    for name in ("recv_tokens_WNN", "sent_tokens_WNN"):
        np.testing.assert_allclose(getattr(again, name), getattr(matrices, name), atol=1 / 5800)
    assert list(read_log(write_records(tmp_path, records)).records) == records
    assert all((one.blocked_us is None) == (noise == "lognormal") for one in records)
