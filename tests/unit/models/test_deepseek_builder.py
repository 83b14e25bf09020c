"""What the builder of DeepSeek models makes of a checkpoint's matrices."""

import torch

from eprt import EngineConfig, EPGroup
from eprt.models.checkpoint import Checkpoint
from eprt.models.loader import load_model
from eprt.ops.weight import Weight, quantize_int8
from tests import tiny


def is_int8_of(weight: Weight, want: torch.Tensor) -> bool:
    of = quantize_int8(want)
    return torch.equal(weight.data, of.data) and torch.equal(weight.scale, of.scale)


def test_with_int8_every_matrix_of_layers_is_quantised_whatever_it_was(tmp_path):
    """Experts, shared expert, dense layers and projections, of bfloat16 or fp8. The gate, the latents' up-projection,
    the embedding and the head are not."""
    tiny.save(tiny.make_model("v3", hidden_size=256, moe_intermediate_size=128, intermediate_size=384), tmp_path)
    for prepare in (lambda directory: None, tiny.quantize_checkpoint):
        prepare(tmp_path)
        model = load_model(EngineConfig(str(tmp_path), quantization="int8", spare_experts=3), EPGroup.single())
        read = Checkpoint(tmp_path).read_weight
        moe, prefix, dense = model.moe_layers()[-1], "model.layers.2.", model.layers[0]
        want = [read(f"{prefix}mlp.experts.5.{p}_proj.weight").dequantize() for p in ("gate", "up", "down")]
        at = moe.weight_buffers()[5]
        w13, w2 = (Weight(w.data[at], w.scale[at]) for w in (moe.pool.w13, moe.pool.w2))
        assert is_int8_of(w13, torch.cat(want[:2])) and is_int8_of(w2, want[2])
        shared_down = moe.shared_experts.down_proj
        for weight, name in (
            (Weight(shared_down.weight, shared_down.weight_scale), f"{prefix}mlp.shared_experts.down_proj"),
            (dense.mlp.down.weight, "model.layers.0.mlp.down_proj"),
            (dense.attention.weights.q_b.weight, "model.layers.0.self_attn.q_b_proj"),
            (dense.attention.weights.o.weight, "model.layers.0.self_attn.o_proj"),
        ):
            assert is_int8_of(weight, read(f"{name}.weight").dequantize()), name
        for plain in (
            moe.gate.weight,
            dense.attention.weights.w_kv_b,
            model.embed_VH,
            model.lm_head.weight.data,
        ):
            assert plain.is_floating_point() and plain.dtype != torch.float8_e4m3fn
        assert moe.pool.parts[1].shape[1] == 4 * 256 and len(moe.pool.parts) == 4, "scales travel with their expert"
        model.close()
