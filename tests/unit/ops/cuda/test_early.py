"""Kernels that start early touch no memory before the preceding kernel has ended: told from their machine code."""

import importlib

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

BF16, FP32, FP8, INT64 = "*bf16", "*fp32", "*fp8e4nv", "*i64"
QUANTISED = {"data": FP8, "scale": FP32, "x": BF16}
GATE = {"weights": FP32, "chosen": INT64, "slots": INT64, "slot_of_expert": INT64, "logits": FP32, "bias": FP32}
# (module, kernel, types of its pointers and floats, constants); other arguments are int32.
KERNELS = (
    (
        "norm",
        "_rms_norm",
        dict.fromkeys(("out", "total", "x", "residual", "weight"), BF16),
        {"ADD": True, "BLOCK": 512},
    ),
    ("norm", "_rms_norm_quantize", {**QUANTISED, "weight": BF16}, {"GROUPS": 4, "SIZE": 128}),
    ("quantize", "_quantize_rows", QUANTISED, {"GROUPS": 8, "SIZE": 128}),
    ("silu", "_silu_mul_quantize", QUANTISED, {"GROUPS": 8, "SIZE": 128}),
    (
        "rope",
        "_rope",
        {"out": BF16, "x": BF16, "cos_sin": FP32, "position": INT64},
        {"INTERLEAVED": True, "HEADS": 16, "HALF": 32},
    ),
    ("rows", "_add_rows", dict.fromkeys("xyz", BF16) | {"out": BF16}, {"BLOCK": 1024}),
    ("linear", "_add", {"out": BF16, "parts": FP32}, {"BLOCK": 1024}),
    (
        "cache",
        "_latent_insert",
        {"pages": BF16, "slot_T": INT64, "kv": BF16, "weight": BF16, "cos_sin": FP32, "position_T": INT64},
        {"FP8": False, "INTERLEAVED": True, "LATENT": 512, "HALF": 32},
    ),
    (
        "gate",
        "_gate_topk",
        {**GATE, "token_id": INT64, "scaling": "fp32"},
        {"TOP_K": 8, "TOP_GROUPS": 4, "GROUPS": 8, "SIZE": 8, "K": 8}
        | dict.fromkeys(("SIGMOID", "NORMALISE", "LIMITED"), True),
    ),
)


@pytest.mark.parametrize("module, kernel, types, constants", KERNELS, ids=[kernel for _, kernel, *_ in KERNELS])
def test_the_first_access_follows_the_wait(module, kernel, types, constants):
    function = getattr(importlib.import_module(f"eprt.ops.cuda.{module}"), kernel)
    constants = {**constants, "EARLY": True}
    types = {"eps": "fp32", **types}
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=values)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True})
    code = compiled.asm["ptx"].split(".entry")[1]
    first_access = min(at for at in (code.find("ld.global"), code.find("st.global")) if at > 0)
    assert 0 < code.find("griddepcontrol.wait") < first_access
    assert code.find("griddepcontrol.wait") < code.find("griddepcontrol.launch_dependents") < first_access
    assert compiled.metadata.launch_pdl


def test_pieces_of_a_weight_are_asked_for_in_the_last_cache():
    """No thread waits: the instruction has no result."""
    prefetch = importlib.import_module("eprt.ops.cuda.prefetch")
    signature = {"data": FP8, "size": "i32", "PIECE": "constexpr", "THREADS": "constexpr"}
    source = ASTSource(fn=prefetch._prefetch, signature=signature, constexprs={(2,): 16384, (3,): 32})
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
    assert "cp.async.bulk.prefetch.L2.global" in code and "ld.global" not in code
