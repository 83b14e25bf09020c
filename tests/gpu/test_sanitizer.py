"""The exchange's kernels under NVIDIA's compute-sanitizer, which comes with the CUDA toolkit."""

import shutil

import pytest

from tests.gpu.gpus import NUM_GPUS, run_case

SANITIZER = shutil.which("compute-sanitizer")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.long,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two NVIDIA GPUs with peer access"),
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, of the CUDA toolkit, on PATH"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_small_case_has_no_errors(tool):
    """API errors are not reported: torch asks for peer access that may be there already."""
    under = [SANITIZER, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
    printed = run_case(2, "cases_sanitizer:small", timeout_s=400, under=under)
    assert printed.count("ERROR SUMMARY: 0 errors" if tool == "memcheck" else "0 hazards displayed") == 2, printed
