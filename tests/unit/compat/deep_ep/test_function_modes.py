"""without_function_modes."""

import torch
from torch.overrides import TorchFunctionMode

from eprt.compat.deep_ep.function_modes import without_function_modes


class CountingMode(TorchFunctionMode):
    """Counts the calls of torch that pass through it."""

    def __init__(self):
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@without_function_modes
def double(x: torch.Tensor, *, offset: float = 0.0) -> torch.Tensor:
    """Twice x."""
    return torch.add(x, x) + offset


def test_a_call_passes_no_mode_and_the_mode_goes_on_afterwards():
    x = torch.ones(3)
    with CountingMode() as mode:
        doubled = double(x, offset=1.0)
        assert mode.count == 0
        torch.add(x, x)
        assert mode.count == 1
    assert doubled.tolist() == [3.0] * 3


def test_a_call_without_a_mode_is_the_same_call():
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert double.__name__ == "double" and double.__doc__ == "Twice x."


def test_the_mode_goes_on_after_an_error():
    @without_function_modes
    def fail() -> None:
        raise ValueError("refused")

    with CountingMode() as mode:
        try:
            fail()
        except ValueError:
            torch.ones(1)
        assert mode.count == 1
