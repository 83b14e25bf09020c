"""What a block may not have, because its replacement would leave it out in silence: hooks, adapters, biases, other
activations.

Knows nothing of where weights come from.
"""

from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils import parametrize

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes of experts that change the activation unless they are None.
_ACTIVATION_LIMITS = ("swiglu_limit", "swiglu_alpha", "limit", "gate_softcap", "up_softcap")


def check_block(block: nn.Module, has_limit: bool = False) -> None:
    """ValueError naming the module and the remedy. has_limit: activations are cut at `limit`, as they will be here."""
    for name, module in block.named_modules():
        where = f"{type(block).__name__}.{name}" if name else type(block).__name__
        _check_adapter(where, module)
        _check_hooks(where, module)
        _check_activation(where, module, ("limit",) if has_limit else ())
        _check_quantisation(where, module)
    for name, _ in block.named_parameters():
        if name.endswith("bias") and not name.endswith("e_score_correction_bias"):
            _refuse(f"{type(block).__name__}.{name}", "is a bias, which experts and gates here do not have")


def _check_adapter(where: str, module: nn.Module) -> None:
    if "base_layer" in dict(module.named_children()) or type(module).__module__.startswith("peft."):
        _refuse(where, f"has an adapter ({type(module).__name__}); merge it first: model.merge_and_unload()")
    if parametrize.is_parametrized(module):
        _refuse(where, "is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first")


def _check_hooks(where: str, module: nn.Module) -> None:
    if "_hf_hook" in vars(module):
        _refuse(where, "is offloaded or moved by accelerate; load the model onto one device, without device_map")
    for kind in _HOOKS:
        hooks = vars(module).get(kind) or {}
        # transformers' own capture outputs of the modules that they are on, which nobody asks EPMoE for.
        foreign = [hook for hook in hooks.values() if not _module_of(hook).startswith("transformers.")]
        if foreign:
            _refuse(where, f"has a hook ({kind}: {foreign[0]}), which would no longer be called; remove it first")


def _module_of(hook: Any) -> str:
    return str(vars(type(hook)).get("__module__") if not callable(hook) else hook.__module__)


def _check_activation(where: str, module: nn.Module, known: tuple[str, ...]) -> None:
    act_fn = dict(module.named_children()).get("act_fn")
    if act_fn is not None and "silu" not in type(act_fn).__name__.lower():
        _refuse(where, f"uses {type(act_fn).__name__}; only SiLU is supported")
    for name in _ACTIVATION_LIMITS:
        if name not in known and vars(module).get(name) is not None:
            _refuse(where, f"has {name}={vars(module)[name]}; only plain SwiGLU is supported")


def _check_quantisation(where: str, module: nn.Module) -> None:
    block_size = vars(module).get("block_size")
    if block_size is not None and tuple(block_size) != (128, 128):
        _refuse(where, f"has fp8 blocks of {tuple(block_size)}; only 128 x 128 is supported, so dequantize the model")
    if vars(module).get("activation_scheme") == "static":
        _refuse(where, "has static activation scales, which would not be used; dequantize the model")
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_floating_point() or parameter.dtype in (torch.float8_e5m2, torch.float16, torch.float64):
            _refuse(
                f"{where}.{name}",
                f"is {parameter.dtype}; load the model with dtype=torch.bfloat16 or torch.float32, or with fp8 (e4m3) "
                "weights in blocks of 128 x 128",
            )


def _refuse(where: str, problem: str) -> NoReturn:
    raise ValueError(f"{where} {problem}")
