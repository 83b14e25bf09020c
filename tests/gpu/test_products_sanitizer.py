"""Products' kernels under NVIDIA's compute-sanitizer, which comes with the CUDA toolkit."""

import shutil

import pytest

from tests.gpu.gpus import MOST_RANKS, run_case

SANITIZER = shutil.which("compute-sanitizer")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.long,
    pytest.mark.one_gpu,
    pytest.mark.skipif(MOST_RANKS < 1, reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, of the CUDA toolkit, on PATH"),
]


def test_bf16_experts_have_no_errors():
    under = [SANITIZER, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    printed = run_case(1, "cases_bf16_experts:few_tiles", timeout_s=400, under=under)
    assert printed.count("ERROR SUMMARY: 0 errors") == 1, printed
