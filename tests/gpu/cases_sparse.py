"""What every rank does in test_sparse.py: DeepSeek-V3.2 on GPUs beside transformers and beside the CPU."""

from pathlib import Path

import torch

from eprt import LLM, EngineConfig, EPGroup, SamplingParams
from eprt.models.loader import load_model
from tests import tiny
from tests.paged import PagedRunner
from tests.recorded import can_record, check_replays
from tests.tiny_mtp import DraftingModel

OPTIONS = {"kv_cache_gb": 0.02, "max_model_len": 320, "max_num_seqs": 8, "chunk_size": 64, "page_size": 16}


def save_goldens(root: Path) -> None:
    """A checkpoint with an MTP layer, and transformers' logits of prompts across top_k."""
    model = DraftingModel(index_topk=48, max_position_embeddings=320)
    prompts = tiny.prompts(lengths=(30, 129, 257), seed=5)
    logits = [tiny.golden_logits(model.model, prompt) for prompt in prompts]
    greedy = tiny.golden_greedy(model.model, prompts[0], 24)
    model.save(root)
    torch.save((prompts, logits, greedy), root / "goldens.pt")


def goldens(group: EPGroup, root: str) -> None:
    """Logits of prompts, whole and in chunks, and greedy tokens."""
    prompts, logits, greedy = torch.load(f"{root}/goldens.pt")
    ours = load_model(EngineConfig(root, device="cuda"), group)
    for prompt, want in zip(prompts, logits):
        for chunk in (1000, 37):
            runner = PagedRunner(ours, num_pages=200)
            error = (runner.prefill(runner.request(prompt), chunk).cpu() - want).abs().max().item()
            print(f"{len(prompt)} tokens, chunks of {chunk}: error of the logits {error:.1e}")
            assert error < 1e-3, (len(prompt), chunk, error)
    runner = PagedRunner(ours, num_pages=200)
    assert runner.greedy(runner.request(prompts[0]), 24) == greedy
    ours.close()


def generate(group: EPGroup, root: str, device: str, **options) -> tuple[list, int]:
    """Greedy tokens of every prompt, and how many drafts were accepted."""
    prompts = tiny.prompts(lengths=(30, 129, 255, 44), seed=5)
    with LLM(root, group, device=device, **{**OPTIONS, **options}) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
        llm.engine.check_integrity()
        if device == "cuda" and options.get("graph_sizes") != () and can_record(llm.engine.model):
            check_replays(llm.engine)
        return [output.outputs[0].token_ids for output in outputs], llm.engine.stats().num_accepted_tokens


def same_tokens_as_on_the_cpu(group: EPGroup, root: str) -> None:
    """In float32, with recorded steps and drafts and without; the CPU is asked by each rank alone."""
    want, _ = generate(EPGroup.single(), root, "cpu", dtype="float32")
    for extra in ({}, {"graph_sizes": ()}, {"num_speculative_tokens": 1}, {"num_speculative_tokens": 2}):
        got, accepted = generate(group, root, "cuda", dtype="float32", **extra)
        print(
            f"{group.size} ranks, {extra}: {sum(a == b for a, b in zip(got, want))} of {len(want)}, {accepted} drafts"
        )
        assert got == want, (extra, got, want)
        assert (accepted > 0) == ("num_speculative_tokens" in extra)


def other_formats(group: EPGroup, root: str) -> None:
    """bfloat16, with a cache of fp8 and without: drafts change no token, and the first tokens are those of float32."""
    want, _ = generate(EPGroup.single(), root, "cpu", dtype="float32")
    for kind in ("auto", "fp8"):
        options = {"dtype": "bfloat16", "kv_cache_dtype": kind}
        tokens = [generate(group, root, "cuda", **options, num_speculative_tokens=num)[0] for num in (0, 1)]
        same = sum(a == b for got, all_of in zip(tokens[0], want) for a, b in zip(got, all_of))
        drafted = sum(a == b for a, b in zip(*tokens))
        print(f"bfloat16, cache {kind}: {same} tokens of float32; with drafts {drafted} of 4 answers alike")
        assert same > 8 and drafted >= 2, (tokens, want)
