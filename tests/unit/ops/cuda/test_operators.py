"""The GPU operators without a GPU: Triton's interpreter against the oracles; and what is said where Triton lacks."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from eprt.ops.attention import PagedContext
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


def test_attention_kernels_are_chosen_by_what_is_installed_and_what_they_take(monkeypatch, caplog):
    pytest.importorskip("triton")
    from eprt.ops.cuda import attention, mla_flashmla, mla_triton

    def chosen(wanted: str, page_size: int = 64, dtype: torch.dtype = torch.bfloat16, prompts: bool = False):
        attention.kernels.cache_clear()
        monkeypatch.setenv("EPRT_GPU_ATTENTION", wanted)
        q, r = torch.empty(2, 128, 512, dtype=dtype), torch.empty(2, 128, 64, dtype=dtype)
        pages = torch.empty(3, page_size, 576, dtype=dtype)
        table, length = torch.empty(2, 3), torch.empty(2)
        return attention.kernel(q, r, PagedContext(pages, table, length, torch.zeros(3) if prompts else None))

    monkeypatch.setattr(mla_flashmla, "is_installed", lambda: False)
    assert chosen("auto") is chosen("triton") is mla_triton
    with pytest.raises(ImportError, match=r"EPRT_GPU_ATTENTION=flashmla: it is not installed; pip install git\+https"):
        chosen("flashmla")
    monkeypatch.setattr(mla_flashmla, "is_installed", lambda: True)
    assert chosen("auto") is chosen("flashmla") is mla_flashmla
    assert chosen("triton") is chosen("auto", prompts=True) is mla_triton
    assert chosen("auto", page_size=16) is chosen("auto", dtype=torch.float32) is mla_triton
    with pytest.raises(ValueError, match=r"=flashmla: it takes pages of 64 tokens .*, not 16; use auto"):
        chosen("flashmla", page_size=16)
    attention._log_choice.cache_clear()
    caplog.set_level("INFO")
    for _ in range(2):
        chosen("auto", page_size=16), chosen("auto"), chosen("triton", page_size=16)
    monkeypatch.setattr(mla_flashmla, "is_installed", lambda: False)
    chosen("auto")
    said = [record.message for record in caplog.records]
    assert len(said) == 4 and said[1:3] == ["decodes are attended by flashmla", "decodes are attended by triton"]
    assert "by triton; not by flashmla: it takes pages of 64 tokens (--page-size 64), not 16" in said[0]
    assert "by triton; not by flashmla: it is not installed (pip install git+https" in said[3]
    attention.kernels.cache_clear()


def test_queries_that_lie_together_are_not_copied_for_flashmla():
    pytest.importorskip("triton")
    from eprt.ops.cuda.mla_flashmla import _joined

    q = torch.randn(2, 3, 24)
    together, apart = _joined(q[..., :16], q[..., 16:]), _joined(q[..., :16], q[..., 16:].clone())
    assert together.data_ptr() == q.data_ptr() and torch.equal(together, q) and torch.equal(apart, q)


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
