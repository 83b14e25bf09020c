"""Runs a transformers MoE model with its experts spread over MPI ranks.

    mpirun -n 4 python examples/patch_hf_model.py                    # a tiny random model of each supported kind
    mpirun -n 4 python examples/patch_hf_model.py --model DIR        # a checkpoint: DeepSeek V2/V3, Qwen3-MoE, Mixtral

It needs transformers (pip install transformers).

Every rank holds the whole model except for the experts, of which it keeps its share, and works on a prompt of its own.
The logits of the patched model are compared with those of the untouched one. Works on one rank without mpirun, too.
"""

import argparse

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from eprt import EPGroup
from eprt.compat.hf import replace_moe_blocks

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 4,
}
LATENT = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
CONFIGS = {
    "DeepSeek V2": lambda: DeepseekV2Config(
        **SHAPE, **LATENT, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "DeepSeek V3": lambda: DeepseekV3Config(**SHAPE, **LATENT, n_group=4, topk_group=2),
    "Qwen3-MoE": lambda: Qwen3MoeConfig(**SHAPE, moe_intermediate_size=32, num_experts=16, norm_topk_prob=True),
    "Mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory; default: tiny random models")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_grad_enabled(False)

    group = EPGroup.from_mpi()
    dtype = getattr(torch, args.dtype)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, experts_implementation="eager").eval()
        compare(args.model, model, group)
    else:
        for name, make_config in CONFIGS.items():
            torch.manual_seed(0)  # the same weights on every rank
            compare(name, AutoModelForCausalLM.from_config(make_config(), dtype=dtype).eval(), group)
    group.close()


def compare(name: str, model: PreTrainedModel, group: EPGroup) -> None:
    """Prints one line: do the patched model's logits and tokens equal the untouched model's, on every rank?"""
    generator = torch.Generator().manual_seed(group.rank)
    length = 8 + 5 * group.rank  # every rank its own prompt, of its own length
    prompt = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    want = model(prompt).logits.float()

    layers = replace_moe_blocks(model, group)
    got = model(prompt).logits.float()
    difference = (got - want).abs().max().item() / want.abs().max().item()
    same_tokens = torch.equal(got.argmax(-1), want.argmax(-1))
    held = sum(expert >= 0 for expert in layers[0].expert_of_slot)
    layers[0].close()

    results = group.allgather((difference, same_tokens, held))
    if group.rank == 0:
        differences, same, experts = zip(*results)
        print(
            f"{name}: {group.size} ranks with {'/'.join(map(str, experts))} experts each, largest relative difference "
            f"of logits {max(differences):.1e}, greedy tokens {'equal' if all(same) else 'DIFFER'}",
            flush=True,
        )
    if model.dtype == torch.float32 and max(result[0] for result in results) > 1e-5:
        raise SystemExit(f"[rank {group.rank}] {name}: the patched model computes something else")


if __name__ == "__main__":
    main()
