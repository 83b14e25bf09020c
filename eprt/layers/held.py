"""What a MoE layer holds, as torch's module interface shows it: parameters over the memory that kernels read.

Names are those of published checkpoints: experts.7.gate_proj.weight is the matrix of logical expert 7. Knows nothing of
communication.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eprt.layers.experts import ExpertPool
from eprt.layers.linear import split_swiglu
from eprt.ops.weight import Weight

QUANTISED = (torch.float8_e4m3fn, torch.int8, torch.uint8)


def lasting(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it was made in inference mode and could not be loaded into outside of it."""
    return tensor.clone() if tensor.is_inference() else tensor


class HeldModule(nn.Module):
    """Parameters that show memory of a layer. It moves with the whole layer only, and loading writes into it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HeldModule":
        for tensor in (*self.parameters(), *self.buffers()):
            moved = fn(tensor.new_empty(0))
            if (moved.dtype, moved.device.type) != (tensor.dtype, tensor.device.type):
                raise RuntimeError(
                    f"{type(self).__name__} is part of an EPMoE and cannot become {moved.dtype} on {moved.device} by "
                    "itself; move the whole EPMoE"
                )
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, *lists) -> None:
        # With assign=True torch would put other tensors here, which no kernel reads.
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


class HeldWeight(HeldModule):
    """One matrix: weight, and for fp8 weight_scale_inv (fp32, one per block), for int8 weight_scale (one per row)."""

    def __init__(self, weight: Weight):
        super().__init__()
        self.weight = _parameter(weight.data)
        if weight.scale is not None:
            name = "weight_scale_inv" if weight.data.dtype == torch.float8_e4m3fn else "weight_scale"
            self.register_parameter(name, _parameter(weight.scale))

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing, unexpected, error_msgs
    ) -> None:
        given = state_dict.get(f"{prefix}weight")
        own = self.weight.dtype
        if given is not None and given.dtype != own and {given.dtype, own} & set(QUANTISED):
            error_msgs.append(
                f"{prefix}weight is {given.dtype}, this layer holds {own}; quantised weights load only from their own "
                "format: build the layer with that weight_format, or from a block with these weights"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, error_msgs)


class HeldSwiglu(HeldModule):
    """gate_proj, up_proj and down_proj of one expert. w13, w2: as in linear.swiglu_weights."""

    def __init__(self, w13: Weight, w2: Weight, intermediate_size: int):
        super().__init__()
        gate, up, down = split_swiglu(w13, w2, intermediate_size)
        self.gate_proj, self.up_proj, self.down_proj = HeldWeight(gate), HeldWeight(up), HeldWeight(down)


class HeldGate(HeldModule):
    """The router: weight [E, H] and, where they are, e_score_correction_bias [E] and tid2eid [V, K]."""

    def __init__(self, weight_EH: Tensor, bias_E: Tensor | None, table_VK: Tensor | None = None):
        super().__init__()
        self.weight = _parameter(weight_EH)
        if bias_E is not None:
            self.register_buffer("e_score_correction_bias", bias_E)
        if table_VK is not None:
            self.register_buffer("tid2eid", table_VK)


class HeldExperts(HeldModule):
    """This rank's experts, each under the number of its logical expert.

    An expert with several slots on this rank is shown once; what is loaded goes into all of them. Loading passes over
    the experts of other ranks.
    """

    def __init__(self, pool: ExpertPool, num_experts: int):
        super().__init__()
        self._pool, self._num_experts = pool, num_experts
        self._places: dict[int, list[int]] = {}  # by logical expert: the buffers of the pool that hold it
        self.register_load_state_dict_post_hook(_copy_to_replicas)

    def show(self, buffers: Mapping[int, list[int]]) -> None:
        """From now on the experts are these, in these buffers of the pool."""
        for expert in self._places.keys() - buffers.keys():
            del self._modules[str(expert)]
        for expert, (first, *_) in buffers.items():
            if self._places.get(expert, [-1])[0] != first:
                self.add_module(str(expert), HeldSwiglu(*self._pool.weights_of(first), self._pool.intermediate_size))
        self._places = dict(buffers)

    def copy_to_replicas(self) -> None:
        """Gives every further slot of an expert what its first one has."""
        for first, *others in self._places.values():
            for part, other in itertools.product(self._pool.parts, others):
                part[other].copy_(part[first])

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing, unexpected, error_msgs
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, error_msgs)
        unexpected[:] = [name for name in unexpected if not self._is_elsewhere(name.removeprefix(prefix))]

    def _is_elsewhere(self, name: str) -> bool:
        expert = name.partition(".")[0]
        return expert.isdecimal() and int(expert) < self._num_experts and int(expert) not in self._places


def _copy_to_replicas(experts: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(experts, HeldExperts)
    experts.copy_to_replicas()


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
