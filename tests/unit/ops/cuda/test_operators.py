"""The GPU operators without a GPU: Triton's interpreter against the oracles; and what is said where Triton lacks."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from eprt.ops.by_device import by_device

ROOT = Path(__file__).resolve().parents[4]


def run(*command: str) -> str:
    """tests/gpu/test_ops.py runs the compiled kernels."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_operators_match_the_oracles_in_the_interpreter():
    pytest.importorskip("triton")
    run("-m", "tests.interpreted")


def test_without_triton_the_remedy_is_named():
    code = """
import sys
sys.modules["triton"] = None
from eprt.ops.by_device import implementations
try:
    implementations("cuda")
except ImportError as error:
    print(error)
"""
    assert "pip install triton" in run("-c", code)


@pytest.mark.parametrize(
    "cuda, capability, takes",
    [
        ("13.0", (9, 0), True),
        ("12.9", (9, 0), True),
        ("12.8", (9, 0), False),
        ("12.6", (9, 0), False),
        (None, (9, 0), False),
        ("13.0", (10, 0), False),
    ],
)
def test_cublas_multiplies_blocks_from_cuda_12_9_on(monkeypatch, cuda, capability, takes):
    """Builds of torch for older ones have the call and refuse it."""
    pytest.importorskip("triton")
    from eprt.ops.cuda import cublas

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    weight = Mock(data=Mock(dtype=torch.float8_e4m3fn, is_cuda=True), shape=torch.Size((128, 512)))
    assert cublas.can_multiply(weight, torch.bfloat16) == takes


def test_an_unknown_device_is_named():
    with pytest.raises(ValueError, match="'meta'"):
        by_device(lambda x: x)(torch.empty(1, device="meta"))
