"""From a transformers MoE block to an EPMoE with copies of what this rank holds.

Knows nothing of how weights are stored (weights.py, loader.py) or of routing rules (kinds.py).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eprt.compat.hf.block import MoEBlock, SwigluMatrices
from eprt.compat.hf.kinds import KINDS, is_moe_block, kind_of
from eprt.compat.hf.loader import Loader, NamedWeights, open_loader
from eprt.compat.hf.refusals import check_block
from eprt.compat.hf.weights import expert_reader, expert_shape, first_weight, swiglu_of, tensors_of
from eprt.config import MoEConfig
from eprt.ep.group.group import EPGroup
from eprt.layers.linear import Matrix
from eprt.layers.mlp import MLP
from eprt.layers.moe import EPMoE
from eprt.ops.weight import Weight


def convert_moe(
    hf_moe_module: nn.Module, group: EPGroup, *, loader: Loader | None = None, prefix: str = "", **options: Any
) -> EPMoE:
    """An EPMoE that replaces one block. Collective over the group unless ep is given.

    It takes any leading shape and returns what the block returned: hidden, or (hidden, router_logits). TypeError for an
    unknown block, ValueError for what is not supported, naming the rank, the module and the remedy.

    loader: for a block on the meta device: a function from a tensor's name to the tensor, or a directory of safetensors
        files. It is asked for this rank's experts, the gate and the shared expert only.
    prefix: of the block's names in the loader, for example "model.layers.3.mlp.".
    options: as for build_moe.
    """
    try:
        block = describe_moe(hf_moe_module, loader, prefix)
    except (TypeError, ValueError) as error:
        raise type(error)(f"[rank {group.rank}/{group.size}] {error}") from None
    moe = build_moe(block, group, **options)
    moe.returns_router_logits = _returns_tuple(hf_moe_module, moe.config)
    return moe.train(hf_moe_module.training)


@torch.inference_mode(False)
@torch.no_grad()
def build_moe(
    block: MoEBlock,
    group: EPGroup,
    *,
    num_max_tokens_per_rank: int = 1024,
    payload: str = "same",
    weight_format: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    **options: Any,
) -> EPMoE:
    """An EPMoE with copies of a block's gate, shared expert and this rank's experts.

    num_max_tokens_per_rank, payload: see MoEConfig.
    weight_format: see MoEConfig; default: fp8 weights stay as they are, others are kept in dtype.
    dtype: of hidden states; default the block's.
    device: "cpu", or "cuda" for this rank's current GPU; default: where the block's weights are.
    options: for EPMoE (layer_idx, backend, mode, ep, slot_map, mask_lost_ranks).
    """
    where = f"[rank {group.rank}/{group.size}]"
    device = _checked_device(torch.device(device or block.device), where)
    expert = _remembering_one(block.expert)
    first, _, _ = expert(_first_expert(block, group, options.get("slot_map")))
    config = MoEConfig(
        hidden_size=block.gate_weight_EH.shape[1],
        intermediate_size=block.intermediate_size,
        num_experts=block.num_experts,
        shared_intermediate_size=0 if block.shared is None else block.shared[0].shape[0],
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        payload=payload,
        weight_format=weight_format or ("fp8" if isinstance(first, Weight) else "same"),
        dtype=dtype or block.dtype or _data(first).dtype,
        **block.routing,
    )
    moe = EPMoE(config, group, device=device.type, **options)
    given = (None if each is None else _own(each, device) for each in (block.gate_bias_E, block.gate_table_VK))
    moe.load_gate(_own(block.gate_weight_EH, device), *given)
    for slot, logical in enumerate(moe.expert_of_slot):
        if logical >= 0:
            moe.load_expert(slot, *(_on(matrix, device) for matrix in expert(logical)))
    if block.shared is not None:
        gate, up, down = (_own(matrix, device) for matrix in block.shared)
        shared_format = config.weight_format
        if weight_format is None and not isinstance(block.shared[0], Weight):
            shared_format = "same"
        moe.load_shared(MLP(gate, up, down, shared_format, config.dtype, config.swiglu_limit))
    return moe


def replace_moe_blocks(
    model: nn.Module, group: EPGroup, *, loader: Loader | None = None, **options: Any
) -> list[EPMoE]:
    """Replaces every block of the model; returns the new layers in order. Collective.

    The layers share one set of communication buffers, which the first layer's close() frees. loader, options: as for
    convert_moe; names in the loader begin with the block's path in the model.
    """
    found = [(name, module) for name, module in model.named_modules() if is_moe_block(module)]
    if not found:
        raise TypeError(f"{type(model).__name__} has no block of the kinds {', '.join(KINDS)}")
    for name, module in found:
        try:
            check_block(module, kind_of(module).has_limit)
        except ValueError as error:  # before any block is replaced
            raise ValueError(f"[rank {group.rank}/{group.size}] {name}: {error}") from None
    read = None if loader is None else open_loader(loader)
    layers: list[EPMoE] = []
    for layer_idx, (name, module) in enumerate(found):
        shared = {"ep": layers[0].ep, "slot_map": layers[0].slot_map} if layers else {}
        source = {} if read is None else {"loader": read, "prefix": f"{name}."}
        moe = convert_moe(module, group, layer_idx=layer_idx, **{**shared, **source, **options})
        if layers and moe.config != layers[0].config:
            raise ValueError(f"{name} has another shape than the blocks before it: {moe.config}")
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, moe)
        layers.append(moe)
    return layers


def describe_moe(module: nn.Module, loader: Loader | None = None, prefix: str = "") -> MoEBlock:
    """Reads a block without changing or copying it. loader, prefix: as for convert_moe."""
    kind = kind_of(module)
    check_block(module, kind.has_limit)
    children = dict(module.named_children())
    experts, gate, shared = children["experts"], children["gate"], children.get("shared_experts")
    num_experts, intermediate_size = expert_shape(experts)
    weight, tensors = first_weight(experts), tensors_of(gate)
    gate_weight_EH = tensors["weight"]
    is_fp8 = weight.dtype == torch.float8_e4m3fn
    block = MoEBlock(
        routing=kind.routing(module),
        gate_weight_EH=gate_weight_EH,
        gate_bias_E=tensors.get("e_score_correction_bias"),
        gate_table_VK=tensors.get("tid2eid"),
        num_experts=num_experts,
        intermediate_size=intermediate_size,
        expert=expert_reader(experts),
        shared=None if shared is None or loader is not None else swiglu_of(shared),
        dtype=gate_weight_EH.dtype if is_fp8 else None,
        device=weight.device,
    )
    if loader is not None:
        named = NamedWeights(open_loader(loader), prefix, kind)
        return _loaded(block, named, None if shared is None else _width(shared))
    if weight.is_meta or gate_weight_EH.is_meta:
        raise ValueError(
            f"{type(module).__name__} is on the meta device and has no weights; pass loader=, a checkpoint directory "
            "or a function from name to tensor"
        )
    return block


def _loaded(block: MoEBlock, named: NamedWeights, shared_size: int | None) -> MoEBlock:
    """The block with its weights read by name."""
    if block.gate_table_VK is not None or block.routing["scoring"] == "sqrtsoftplus":
        raise ValueError("blocks of DeepSeek V4 are not read by name; load the model's weights first, without loader=")
    weight_EH, bias_E = block.gate_weight_EH, block.gate_bias_E
    hidden_size, bias_name = weight_EH.shape[1], "gate.e_score_correction_bias"
    return replace(
        block,
        gate_weight_EH=named.tensor("gate.weight", tuple(weight_EH.shape)),
        gate_bias_E=None if bias_E is None else named.tensor(bias_name, tuple(bias_E.shape)),
        expert=lambda expert: named.expert(expert, block.intermediate_size, hidden_size),
        shared=None if shared_size is None else named.shared(shared_size, hidden_size),
        dtype=weight_EH.dtype,
        device=torch.device("cpu"),
    )


def _width(mlp: nn.Module) -> int:
    return mlp.get_submodule("gate_proj").get_parameter("weight").shape[0]


def _first_expert(block: MoEBlock, group: EPGroup, slot_map: Any) -> int:
    """One that this rank will hold, so that reading it is not in vain; 0 where it holds none."""
    if slot_map is None:
        held = range(group.rank * -(-block.num_experts // group.size), block.num_experts)
    else:
        held = [expert for expert in slot_map.experts_of_rank(group.rank, group.size) if expert >= 0]
    return next(iter(held), 0)


def _remembering_one(expert: Callable[[int], SwigluMatrices]) -> Callable[[int], SwigluMatrices]:
    """So that what was read to learn its format is not read again."""
    last: dict[int, SwigluMatrices] = {}

    def remembered(logical: int) -> SwigluMatrices:
        return last.pop(logical) if logical in last else last.setdefault(logical, expert(logical))

    return remembered


def _checked_device(device: torch.device, where: str) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where} device={device}: must be cpu or cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"{where} device={device}: torch {torch.__version__} sees no GPU here")
        current = torch.device("cuda", torch.cuda.current_device())
        if device.index not in (None, current.index):
            raise ValueError(
                f"{where} the block is to be on {device}, but this rank's current GPU is {current}; call "
                f"torch.cuda.set_device({device.index}) first, before the group is made"
            )
        return current
    return device


def _data(matrix: Matrix) -> Tensor:
    return matrix.data if isinstance(matrix, Weight) else matrix


def _on(matrix: Matrix, device: torch.device) -> Any:
    if isinstance(matrix, Weight):
        assert matrix.scale is not None
        return Weight(matrix.data.to(device), matrix.scale.to(device))
    return matrix.detach().to(device)


def _own(matrix: Matrix, device: torch.device) -> Any:
    """A copy, which the old block does not keep alive."""
    if isinstance(matrix, Weight):
        assert matrix.scale is not None
        return Weight(matrix.data.to(device, copy=True), matrix.scale.to(device, copy=True))
    return matrix.detach().to(device, copy=True)


def _returns_tuple(module: nn.Module, config: MoEConfig) -> bool:
    """Whether the block returns router logits too, which depends on the version of transformers: calls it once, where
    its weights can be computed with at once."""
    gate = module.get_submodule("gate")
    weights = list(module.parameters())
    if isinstance(gate, nn.Linear) or any(w.is_meta or w.dtype == torch.float8_e4m3fn for w in weights):
        return isinstance(gate, nn.Linear)  # transformers 4, whose blocks returned both
    was_training = module.training
    device = weights[0].device
    token_ids = (
        (torch.zeros(1, 1, dtype=torch.int64, device=device),) if "tid2eid" in dict(gate.named_buffers()) else ()
    )
    with torch.no_grad():
        out = module.eval()(torch.zeros(1, 1, config.hidden_size, dtype=weights[0].dtype, device=device), *token_ids)
    module.train(was_training)
    return isinstance(out, tuple)
