"""BufferChecks without a GPU: arguments that look like the last good ones are not checked again."""

from typing import Any

import pytest
import torch

from eprt.compat.deep_ep.checks import BufferChecks


class OnGpu:
    """As much of a tensor as the checks look at, on a GPU that this machine need not have."""

    device = "cuda:0"

    def __init__(self, dtype: torch.dtype, *shape: int, contiguous: bool = True):
        self.dtype, self.shape, self._contiguous = dtype, torch.Size(shape), contiguous

    def is_contiguous(self) -> bool:
        return self._contiguous

    def data_ptr(self) -> int:
        return 0

    def get_device(self) -> int:
        return 0


def on_gpu(*args: Any, **kwargs: Any) -> Any:
    return OnGpu(*args, **kwargs)


def test_a_call_that_looks_like_the_last_good_one_is_not_checked_again_and_any_other_is(monkeypatch):
    checks, looked = BufferChecks(1, 2, 0), []
    monkeypatch.setattr(
        checks, "check_tensor", lambda *args: (looked.append(args[1]), BufferChecks.check_tensor(checks, *args))
    )

    def dispatch(dtype=torch.bfloat16, tokens=3, contiguous=True, idx_tokens=3, **changed) -> None:
        x, idx = on_gpu(dtype, tokens, 512, contiguous=contiguous), on_gpu(torch.int64, idx_tokens, 8)
        asked: dict[str, Any] = {"max_tokens": 4, "num_experts": 6, "formats": (True, True, True)} | changed
        checks.check_dispatch(x, idx, None, None, None, **asked, async_finish=False, return_recv_hook=False)

    dispatch()
    assert looked == ["x", "topk_idx"]
    dispatch()
    assert looked == ["x", "topk_idx"]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("x is torch.float32", {"dtype": torch.float32}),
        ("x is not contiguous", {"contiguous": False}),
        ("5 tokens", {"tokens": 5, "idx_tokens": 5}),
        ("topk_idx is torch.int64", {"idx_tokens": 2}),
        ("num_experts=7", {"num_experts": 7}),
        ("round_scale=True", {"formats": (True, False, True)}),
    ]
    for words, changed in cases:
        for _ in range(2):  # what was refused is not remembered
            with pytest.raises(ValueError, match=rf"\[rank 1/2\].*{words}"):
                dispatch(**changed)
    y, idx, weights = on_gpu(torch.bfloat16, 3, 8, 512), on_gpu(torch.int64, 3, 8), on_gpu(torch.float32, 3, 8)
    for num_tokens in (3, 3, 2):
        try:
            checks.check_combine(y, idx, weights, None, None, num_tokens, (3, 8, 512), 8, False, False)
        except ValueError as error:
            assert num_tokens == 2 and "3 tokens, but the handle is of a dispatch of 2" in str(error)
        else:
            assert num_tokens == 3
