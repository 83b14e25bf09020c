"""What every rank does in test_hf.py: blocks and models of transformers on GPUs, patched with EPMoE."""

from pathlib import Path

import torch
import transformers

from eprt import EPGroup, EPMoE
from eprt.compat.hf import replace_moe_blocks
from eprt.gpu.device import take_device
from tests import tiny

FAMILIES = [name for name in tiny.FAMILIES if name != "v32" or "DeepseekV32Config" in dir(transformers)]
NUM_NEW = 12
MOST_TOKENS = 64


def on_gpu(group: EPGroup) -> None:
    take_device("cuda", group)
    torch.set_grad_enabled(False)


def hidden_states(group: EPGroup, num_tokens: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """This rank's own."""
    generator = torch.Generator().manual_seed(100 * seed + group.rank)
    return torch.randn(num_tokens, 64, generator=generator).to("cuda", dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the median token: another rounding may give a token other experts."""
    error_T = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)
    return error_T.median().item()


def blocks(group: EPGroup) -> None:
    """Weights on the GPU stay there; what comes out is what the block gave."""
    on_gpu(group)
    for family in FAMILIES:
        for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            block = tiny.make_moe_block(family, dtype=dtype).cuda()
            moe = EPMoE.from_hf(block, group, num_max_tokens_per_rank=MOST_TOKENS)
            assert all(parameter.is_cuda for parameter in moe.parameters())
            for num_tokens in (1, 17, 100 + 3 * group.rank):
                x_TH = hidden_states(group, num_tokens, dtype)
                error = relative_error(moe(x_TH), block(x_TH[None])[0])
                assert error < limit, (family, dtype, num_tokens, error)
            moe.close()


def greedy(model, prompt: list[int], most: int) -> list[int]:
    """Greedy tokens, on every rank alike often, however long the prompts are."""
    return tiny.golden_greedy(model, prompt, most)


def same_tokens_in_float32(group: EPGroup) -> None:
    on_gpu(group)
    for family in FAMILIES:
        model = tiny.make_family(family).cuda()
        (prompt,) = tiny.prompts(lengths=(9 + 4 * group.rank,), seed=group.rank)
        want = greedy(model, prompt, NUM_NEW)
        layers = replace_moe_blocks(model, group)
        assert greedy(model, prompt, NUM_NEW) == want, family
        layers[0].close()


def bfloat16_agreement(group: EPGroup, least: float = 0.9) -> float:
    """How often the likeliest next token is the same, over all positions of random prompts."""
    on_gpu(group)
    same = total = 0
    for family in FAMILIES:
        model = tiny.make_family(family).bfloat16().cuda()
        prompts = tiny.prompts(lengths=(120,) * 4, seed=group.rank)
        want = [tiny.golden_logits(model, prompt) for prompt in prompts]
        layers = replace_moe_blocks(model, group)
        for prompt, want_TV in zip(prompts, want):
            agree_T = tiny.golden_logits(model, prompt).argmax(-1) == want_TV.argmax(-1)
            same, total = same + int(agree_T.sum()), total + len(agree_T)
        layers[0].close()
    counts = group.allgather((same, total))
    rate = sum(count for count, _ in counts) / sum(count for _, count in counts)
    if group.rank == 0:
        print(f"bfloat16, {group.size} ranks: {rate:.4f} of {sum(count for _, count in counts)} likeliest tokens agree")
    assert rate > least
    return rate


def fp8(group: EPGroup, root: str) -> None:
    """A checkpoint with block scales as transformers loads it: its experts stay fp8, bit for bit."""
    on_gpu(group)
    directory = Path(root) / f"fp8-{group.rank}"
    model = tiny.make_variant("v3", hidden_size=256, moe_intermediate_size=128, intermediate_size=256)
    tiny.save(model, directory)
    tiny.quantize_checkpoint(directory)
    tiny.round_to_fp8_blocks(model)
    exact = model.model.layers[-1].mlp.cuda()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, device_map={"": torch.cuda.current_device()}
    )
    block = loaded.model.layers[-1].mlp
    assert block.experts.down_proj.dtype == torch.float8_e4m3fn, "transformers dequantized it"
    moe = EPMoE.from_hf(block, group)
    assert moe.config.weight_format == "fp8" and moe.config.dtype == torch.bfloat16
    held = moe.state_dict()
    for expert in (e for e in moe.expert_of_slot if e >= 0):
        name = f"experts.{expert}.down_proj."
        assert torch.equal(held[name + "weight"].view(torch.uint8), block.experts.down_proj[expert].view(torch.uint8))
        assert torch.equal(held[name + "weight_scale_inv"], block.experts.down_proj_scale_inv[expert])
    x_TH = torch.randn(50, 256, generator=torch.Generator().manual_seed(group.rank)).cuda()
    error = relative_error(moe(x_TH.bfloat16()), exact(x_TH[None])[0])
    assert error < 0.06, error
    moe.close()


def recorded(group: EPGroup) -> None:
    """A graph that the caller records replays what forward computes, for other tokens in the same memory."""
    on_gpu(group)
    block = tiny.make_moe_block("v3", dtype=torch.bfloat16).cuda()
    moe = EPMoE.from_hf(block, group, mode="low_latency", num_max_tokens_per_rank=16)
    x_TH = hidden_states(group, 16, torch.bfloat16)
    for _ in range(2):
        moe(x_TH)
    graph = torch.cuda.CUDAGraph()
    group.barrier()
    with torch.cuda.graph(graph):
        y_TH = moe(x_TH)
    for seed in range(1, 4):
        new_TH = hidden_states(group, 16, torch.bfloat16, seed)
        x_TH.copy_(new_TH)
        graph.replay()
        got_TH = y_TH.clone()
        assert torch.equal(got_TH, moe(new_TH)), seed
        assert relative_error(got_TH, block(new_TH[None])[0]) < 1e-2
    moe.ep.check()
    moe.close()


def not_recordable(group: EPGroup) -> None:
    """Said before anything is launched, so that the stream and the layer can go on."""
    on_gpu(group)
    moe = EPMoE.from_hf(tiny.make_moe_block("v3", dtype=torch.bfloat16).cuda(), group)
    x_TH = hidden_states(group, 4, torch.bfloat16)
    want_TH = moe(x_TH)
    if group.size > 1:
        message = ""
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                moe(x_TH)
        except ValueError as error:
            message = str(error)
        assert "cannot be captured in a CUDA graph" in message and 'mode="low_latency"' in message, message
        assert torch.equal(moe(x_TH), want_TH)
    moe.close()


def compiled(group: EPGroup) -> None:
    """torch.compile without a graph break: the operator in Inductor's program, for any number of tokens."""
    on_gpu(group)
    model = tiny.make_family("v3").cuda()
    layers = replace_moe_blocks(model, group)
    moe = layers[0]
    program = torch.compile(lambda x_TH: torch.relu(moe(x_TH) * 2) + x_TH, fullgraph=True, dynamic=True)
    for num_tokens in (5, 9, 1 + group.rank, 33):
        x_TH = hidden_states(group, num_tokens, torch.float32)
        torch.testing.assert_close(program(x_TH), torch.relu(moe(x_TH) * 2) + x_TH)
    (prompt,) = tiny.prompts(lengths=(11,), seed=group.rank)
    want_TV = tiny.golden_logits(model, prompt)
    got_TV = tiny.golden_logits(torch.compile(model, fullgraph=True, backend="aot_eager"), prompt)
    torch.testing.assert_close(got_TV, want_TV, rtol=1e-4, atol=1e-4)
    layers[0].close()


def compiled_and_recorded(group: EPGroup) -> None:
    """The caller records a compiled program; and Inductor, asked for graphs of its own, leaves this operator out."""
    on_gpu(group)
    block = tiny.make_moe_block("qwen3", dtype=torch.bfloat16).cuda()
    moe = EPMoE.from_hf(block, group, mode="low_latency", num_max_tokens_per_rank=16)
    x_TH = hidden_states(group, 16, torch.bfloat16)
    program = torch.compile(lambda x_TH: torch.relu(moe(x_TH)) + x_TH, fullgraph=True)
    for _ in range(2):
        program(x_TH)
    torch.cuda.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TH = program(x_TH)
    for seed in (1, 2):
        x_TH.copy_(hidden_states(group, 16, torch.bfloat16, seed))
        graph.replay()
        assert torch.equal(y_TH.clone(), program(x_TH)), seed
    overhead = torch.compile(lambda x_TH: torch.relu(moe(x_TH)) + x_TH, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x_TH = hidden_states(group, 16, torch.bfloat16, seed)
        assert torch.equal(overhead(x_TH).clone(), program(x_TH)), seed
    moe.close()


def loaded(group: EPGroup) -> None:
    """From the meta device to the GPU, reading this rank's experts alone."""
    on_gpu(group)
    block = tiny.make_moe_block("v3", dtype=torch.bfloat16)
    tensors, asked = {"gate.weight": block.gate.weight}, []
    tensors["gate.e_score_correction_bias"] = block.gate.e_score_correction_bias
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"shared_experts.{name}.weight"] = block.shared_experts.get_submodule(name).weight
        for expert in range(16):
            gate, up = block.experts.gate_up_proj[expert].chunk(2)
            matrix = {"gate_proj": gate, "up_proj": up, "down_proj": block.experts.down_proj[expert]}[name]
            tensors[f"experts.{expert}.{name}.weight"] = matrix
    empty = tiny.make_moe_block("v3", dtype=torch.bfloat16).to("meta")
    options = {"device": "cuda", "loader": lambda name: asked.append(name) or tensors[name]}
    moe = EPMoE.from_hf(empty, group, **options)
    held = [expert for expert in moe.expert_of_slot if expert >= 0]
    assert {int(name.split(".")[1]) for name in asked if name.startswith("experts.")} == set(held)
    assert all(parameter.is_cuda for parameter in moe.parameters())
    x_TH = hidden_states(group, 20, torch.bfloat16)
    assert relative_error(moe(x_TH), block.cuda()(x_TH[None])[0]) < 1e-2
    moe.close()


def moved(group: EPGroup) -> None:
    """Patched on the CPU, moved to the GPU, and to bfloat16 and back; loaded with its own state_dict."""
    on_gpu(group)
    model = tiny.make_family("glm4")
    (prompt,) = tiny.prompts(lengths=(13,), seed=group.rank)
    want = greedy(model, prompt, 4)
    layers = replace_moe_blocks(model, group)
    assert greedy(model, prompt, 4) == want
    before = {name: tensor.clone() for name, tensor in layers[1].state_dict().items()}
    model.cuda()
    assert greedy(model, prompt, 4) == want
    assert all(tensor.is_cuda for tensor in model.state_dict().values())
    for parameter in layers[1].parameters():
        parameter.zero_()
    layers[1].load_state_dict(before)
    assert greedy(model, prompt, 4) == want
    model.bfloat16()
    assert tiny.golden_logits(model, prompt).isfinite().all() and layers[0].ep is layers[1].ep
    layers[0].close()


def wrong_inputs(group: EPGroup) -> None:
    on_gpu(group)
    moe = EPMoE.from_hf(tiny.make_moe_block("v3", dtype=torch.bfloat16).cuda(), group)
    good_TH = hidden_states(group, 4, torch.bfloat16)
    rank = f"[rank {group.rank}/{group.size}] EPMoE layer 0: "
    for wrong, words in (
        (good_TH.cpu(), "hidden_TH is on cpu, the layer on cuda"),
        (good_TH.float(), "hidden_TH: got torch.float32 (4, 64), expected torch.bfloat16"),
        (good_TH[:, :63], "hidden_TH: got torch.bfloat16 (4, 63)"),
    ):
        message = ""
        try:
            moe(wrong)
        except ValueError as error:
            message = str(error)
        assert message.startswith(rank) and words in message, message
    wide = torch.stack((good_TH, good_TH), dim=-1)[..., 0]
    assert not wide.is_contiguous() and torch.equal(moe(wide), moe(good_TH))
    moe.close()


QUICK = (
    blocks,
    same_tokens_in_float32,
    bfloat16_agreement,
    fp8,
    recorded,
    not_recordable,
    loaded,
    moved,
    wrong_inputs,
    compiled,
)
LONG = (compiled_and_recorded,)


def quick(group: EPGroup, root: str) -> None:
    """One after the other in one process: importing transformers takes longer than most of them."""
    for case in QUICK:
        case(group, root) if case is fp8 else case(group)


def long(group: EPGroup) -> None:
    for case in LONG:
        case(group)
