"""Seeded random tensors on the device under test, and the comparison."""

import torch
from torch import Tensor

from eprt.ops.elementwise import Rotation
from eprt.ops.weight import Weight

DTYPES = (torch.float32, torch.bfloat16)


class Draw:
    """Seeded random tensors on the device under test, and the comparison."""

    def __init__(self, device: str, seed: int = 0):
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def rotation(self, size: int, tokens: int, interleaved: bool) -> Rotation:
        return Rotation(self.normal(50, size), self.integers(0, 50, tokens), interleaved)


def near(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    """Relative to the length of the whole; NaN never passes."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert got.shape == want.shape, (what, got.shape, want.shape)
    error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item() if want.numel() else 0.0
    assert error <= tolerance, f"{what}: relative error {error:.2e} above {tolerance:.0e}"


def cpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


# The interpreter cuts bfloat16 and e4m3 off where GPUs round.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def experts_at(w: Weight, buffer: Tensor) -> Weight:
    """The experts' own matrices, in order. (torch does not index e4m3.)"""
    data = w.data.view(torch.uint8)[buffer.long()].view(w.data.dtype)
    return Weight(data, None if w.scale is None else w.scale[buffer.long()])


def weight_on(device: str, w: Weight) -> Weight:
    return Weight(w.data.to(device), None if w.scale is None else w.scale.to(device))
