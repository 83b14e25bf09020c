"""Runs a transformers MoE model with its experts spread over MPI ranks.

    mpirun -n 4 python examples/patch_hf_model.py                    # a tiny random model of each supported kind
    mpirun -n 4 python examples/patch_hf_model.py --model DIR        # a checkpoint of one of these kinds
    mpirun -n 2 python examples/patch_hf_model.py --device cuda      # on GPUs, one for each rank

It needs transformers (pip install transformers).

Every rank holds the whole model except for the experts, of which it keeps its share, and works on a prompt of its own.
The logits and the greedy tokens of the patched model are compared with those of the untouched one. In bfloat16, where
both round differently, the example says how many tokens agree. Works on one rank without mpirun, too.
"""

import argparse

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from eprt import EPGroup
from eprt.compat.hf import replace_moe_blocks
from eprt.gpu.device import take_device

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
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {**EXPERTS, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 16}
GROUPS = {"n_group": 4, "topk_group": 2}
INDEXER = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
# name -> transformers' configuration class, its fields
KINDS = {
    "DeepSeek V2": ("DeepseekV2Config", {**LATENT, **GROUPS, "topk_method": "group_limited_greedy"}),
    "DeepSeek V3": ("DeepseekV3Config", {**LATENT, **GROUPS}),
    "DeepSeek V3.2": ("DeepseekV32Config", {**LATENT, **GROUPS, **INDEXER}),
    "GLM-4-MoE": ("Glm4MoeConfig", {**EXPERTS, **GROUPS}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {"moe_intermediate_size": 32, "num_experts": 16, "norm_topk_prob": True}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 16}),
}
NUM_NEW = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory; default: tiny random models")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_grad_enabled(False)

    group = EPGroup.from_mpi()
    device, dtype = take_device(args.device, group), getattr(torch, args.dtype)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, experts_implementation="eager")
        compare(args.model, model.eval().to(device), group)
    else:
        for name, (config_class, fields) in KINDS.items():
            if config_class not in dir(transformers):  # an older version
                continue
            config = getattr(transformers, config_class)(**SHAPE, **fields)
            torch.manual_seed(0)  # the same weights on every rank
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
            compare(name, model.eval().to(device), group)
    group.close()


def compare(name: str, model: PreTrainedModel, group: EPGroup) -> None:
    """Prints one line: are the patched model's logits and tokens the untouched model's, on every rank?"""
    generator = torch.Generator().manual_seed(group.rank)
    length = 8 + 5 * group.rank  # every rank its own prompt, of its own length
    prompt = torch.randint(model.config.vocab_size, (1, length), generator=generator).to(model.device)
    want, want_tokens = model(prompt).logits.float(), greedy(model, prompt)

    layers = replace_moe_blocks(model, group)
    got, tokens = model(prompt).logits.float(), greedy(model, prompt)
    difference = (got - want).abs().max().item() / want.abs().max().item()
    agreeing = int((tokens == want_tokens).sum())
    held = sum(expert >= 0 for expert in layers[0].expert_of_slot)
    layers[0].close()

    differences, agreeing_by_rank, experts = zip(*group.allgather((difference, agreeing, held)))
    total = NUM_NEW * group.size
    if group.rank == 0:
        same = "equal" if sum(agreeing_by_rank) == total else f"agree in {sum(agreeing_by_rank)} of {total}"
        print(
            f"{name}: {group.size} ranks with {'/'.join(map(str, experts))} experts each, largest relative difference "
            f"of logits {max(differences):.1e}, greedy tokens {same}",
            flush=True,
        )
    limit = 1e-5 if model.device.type == "cpu" else 1e-4
    if model.dtype == torch.float32 and (max(differences) > limit or sum(agreeing_by_rank) < total):
        raise SystemExit(f"[rank {group.rank}] {name}: the patched model computes something else")


def greedy(model: PreTrainedModel, prompt: Tensor) -> Tensor:
    """The next tokens: as many on every rank, because every rank calls every layer equally often."""
    options = {"min_new_tokens": NUM_NEW, "max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(prompt, **options)[0, prompt.shape[1] :]


if __name__ == "__main__":
    main()
