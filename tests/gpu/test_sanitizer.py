"""The exchange's and attention's kernels under NVIDIA's compute-sanitizer, which comes with the CUDA toolkit."""

import shutil

import pytest

from tests.gpu.gpus import MOST_RANKS, run_case

SANITIZER = shutil.which("compute-sanitizer")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.long,
    pytest.mark.skipif(MOST_RANKS < 1, reason="needs NVIDIA GPUs"),
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, of the CUDA toolkit, on PATH"),
]


# Not under racecheck: the consumers of mla_decode and mla_decode_fp8 hand values over by barriers of 256 of a
# block's 384 threads (bar.sync, bar.arrive), which the tool takes for none where the two sides stand at different
# places in the code. Of mla_decode_fp8 it reports sums, scales and weights that one warpgroup stores in front of such a
# barrier and the other one reads behind it. Nor index_scores: a warp's lanes read keys, meet by __syncwarp, and one of
# them arrives at the barrier behind which the keys are written over; the tool names the reads of the 31 others.
CASES = [
    ("memcheck", 2, "small"),
    ("memcheck", 1, "latent_attention"),
    ("memcheck", 1, "fp8_latent_attention"),
    ("memcheck", 1, "prompt_attention"),
    ("memcheck", 1, "sparse_choices"),
    ("memcheck", 1, "sparse_scores"),
    ("memcheck", 1, "gathered_attention"),
    ("racecheck", 2, "small"),
    ("racecheck", 1, "prompt_attention"),
    ("racecheck", 1, "sparse_choices"),
]


@pytest.mark.parametrize("tool, ranks, case", CASES)
def test_a_small_case_has_no_errors(tool, ranks, case):
    """API errors are not reported: torch asks for peer access that may be there already."""
    under = [SANITIZER, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
    printed = run_case(ranks, f"cases_sanitizer:{case}", timeout_s=400, under=under)
    none = "ERROR SUMMARY: 0 errors" if tool == "memcheck" else "0 hazards displayed"
    assert printed.count(none) == ranks, printed
