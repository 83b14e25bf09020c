"""Triton without a GPU: its interpreter runs the kernels of eprt.ops.cuda on CPU tensors, slowly.

    python -m tests.interpreted      runs the cases of GPU operators (tests/gpu/test_ops.py)

It must be asked for before anything imports Triton, hence a process of its own.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_and_mend(tensor, scope) -> None:
    """Triton 3.6 keeps scalars as arrays of one element, which numpy from 2.4 on turns into no number by itself."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_and_mend


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Triton 3.6's own multiplies the bits of bfloat16 as if they were integers; and numpy, integers slowly."""
    if a.dtype.scalar == tl.int8:  # exact in float64
        products = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(products.astype(np.int32) + d.data, d.dtype.scalar)
    wide = [
        interpreter._convert_float(x.data, x.dtype.scalar, tl.float32, None).view(np.float32)
        if x.dtype.scalar != tl.float32
        else x.data
        for x in (a, b)
    ]
    return interpreter.TensorHandle(np.matmul(*wide) + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot


_convert_float = interpreter._convert_float


def _round_float(values, from_type, to_type, rounding_mode):
    """Triton 3.6's own cuts bits off where a GPU rounds to the nearest."""
    narrow = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}.get(str(to_type))
    if narrow is None or str(from_type) != "fp32":
        return _convert_float(values, from_type, to_type, rounding_mode)
    wide = torch.from_numpy(np.array(values).view(np.float32))
    if narrow is torch.float8_e4m3fn:
        wide = wide.clamp(-448, 448)
    rounded = wide.to(narrow).view(torch.int16 if narrow is torch.bfloat16 else torch.uint8)
    return rounded.numpy().view(np.uint16 if narrow is torch.bfloat16 else np.uint8)


interpreter._convert_float = _round_float


def main() -> None:
    from tests.gpu import (
        cases_expert_ops,
        cases_group_linear,
        cases_grouped,
        cases_index_rows,
        cases_indexer,
        cases_int8,
        cases_many_rows,
        cases_ops,
        cases_products,
        cases_v4_attention,
        cases_v4_experts,
        cases_v4_rows,
    )
    from tests.gpu import cases_latent_attention as latent
    from tests.gpu import cases_token_mask as masks
    from tests.gpu.draw import Draw

    dense = (
        *cases_ops.ALL,
        *masks.ALL,
        *cases_products.SMALL,
        *latent.SMALL,
        *cases_indexer.SMALL,
        *cases_index_rows.ALL,
        *cases_group_linear.ALL,
        *cases_v4_rows.SMALL,
        *cases_v4_attention.SMALL,
        *cases_v4_experts.SMALL,
    )
    for case in (*dense, *cases_expert_ops.ALL, *cases_grouped.ALL, *cases_int8.SMALL, *cases_many_rows.ALL):
        case(Draw("cpu"))
    cases_products.experts(Draw("cpu"), shapes=((3, 128, 128),))
    latent.attention(Draw("cpu"), heads_and_sizes=((4, 32, 8, 16, 16),))


if __name__ == "__main__":
    main()
