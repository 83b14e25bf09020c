"""DeepGEMM's fp8 products, if a package of it is installed: grouped rows in both of its layouts, and dense ones.

Knows DeepGEMM (`pip install sgl-deep-gemm`), which compiles its kernels as it is called; knows nothing of what is
measured.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.weight import Weight


def load() -> ModuleType:
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, OSError) as error:
        raise SystemExit(f"the peer of this benchmark is missing: pip install sgl-deep-gemm ({error})") from None


@dataclass(frozen=True)
class PeerProduct:
    """A product whose operands are laid out: a call launches it alone."""

    launch: Callable[[], None]
    y: Tensor  # bf16 [P, N]: what a launch writes, with the rows between experts
    places_R: Tensor | None  # rows of y that are experts' rows, in their order; None: all

    def __call__(self) -> None:
        self.launch()

    def rows(self) -> Tensor:
        return self.y if self.places_R is None else self.y[self.places_R]


class DeepGemm:
    """Makes products of bf16 rows, which it quantises, and fp8 weights."""

    def __init__(self, module: ModuleType):
        self.module = module
        self.alignment: int = module.get_mk_alignment_for_contiguous_layout()

    def dense(self, x_MK: Tensor, w: Weight) -> PeerProduct:
        x, y_MN = self._quantised(x_MK), x_MK.new_empty(x_MK.shape[0], w.shape[0])
        return PeerProduct(lambda: self.module.fp8_gemm_nt(x, (w.data, w.scale), y_MN), y_MN, None)

    def contiguous(self, x_RK: Tensor, w: Weight, counts: list[int]) -> PeerProduct:
        """Expert after expert, each padded to whole tiles: made for many rows."""
        rooms = [-(-count // self.alignment) * self.alignment for count in counts]
        x_PK, places_R = _placed(x_RK, rooms, counts)
        expert_P = torch.full((len(x_PK),), -1, dtype=torch.int32, device=x_RK.device)
        expert_P[places_R] = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).int().to(x_RK.device)
        x, y_PN = self._quantised(x_PK), x_RK.new_empty(len(x_PK), w.shape[1])
        product = self.module.m_grouped_fp8_gemm_nt_contiguous
        return PeerProduct(lambda: product(x, (w.data, w.scale), y_PN, expert_P), y_PN, places_R)

    def masked(self, x_RK: Tensor, w: Weight, counts: list[int]) -> PeerProduct:
        """Equal room for each expert, whose rows only the GPU knows: made for few rows."""
        num_experts, room = len(counts), -(-max(counts) // 64) * 64
        x_PK, places_R = _placed(x_RK, [room] * num_experts, counts)
        data_PK, scale_PG = quantize_rows(x_PK)
        scale = self._columns(scale_PG.view(num_experts, room, -1))
        x, count_E = (data_PK.view(num_experts, room, -1), scale), torch.tensor(counts).int().to(x_RK.device)
        y_ERN, mean = x_RK.new_empty(num_experts, room, w.shape[1]), max(1, round(sum(counts) / num_experts))
        product = self.module.fp8_m_grouped_gemm_nt_masked
        return PeerProduct(lambda: product(x, (w.data, w.scale), y_ERN, count_E, mean), y_ERN.flatten(0, 1), places_R)

    def _quantised(self, x_MK: Tensor) -> tuple[Tensor, Tensor]:
        data_MK, scale_MG = quantize_rows(x_MK)
        return data_MK, self._columns(scale_MG)

    def _columns(self, scale: Tensor) -> Tensor:
        """The scales as the kernels load them, so that a call does not convert them."""
        return self.module.get_mn_major_tma_aligned_tensor(scale.contiguous())


def _placed(x_RK: Tensor, rooms: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
    """(rows with each expert's room, 0 where there are none; places of the experts' rows among them)"""
    begins = torch.tensor(rooms).cumsum(0) - torch.tensor(rooms)
    places = [torch.arange(begin, begin + count) for begin, count in zip(begins.tolist(), counts, strict=True)]
    places_R = torch.cat(places).to(x_RK.device)
    x_PK = x_RK.new_zeros(sum(rooms), x_RK.shape[1])
    x_PK[places_R] = x_RK
    return x_PK, places_R
