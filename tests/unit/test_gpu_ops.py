"""The GPU operators without a GPU: Triton's interpreter against the oracles; and what is said where Triton lacks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eprt.ops.by_device import by_device

ROOT = Path(__file__).resolve().parents[2]


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


def test_an_unknown_device_is_named():
    with pytest.raises(ValueError, match="'meta'"):
        by_device(lambda x: x)(torch.empty(1, device="meta"))
