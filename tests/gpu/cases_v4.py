"""What every rank does in test_v4.py: DeepSeek V4 on GPUs beside transformers and beside the CPU."""

from pathlib import Path
from typing import Any

import torch

from eprt import LLM, EngineConfig, EPGroup, SamplingParams
from eprt.models.loader import load_model
from examples.demo_model.chat import render
from examples.demo_model.score import held_out_questions, score
from tests import tiny_v4
from tests.paged_v4 import HybridRunner
from tests.paths import DEMO_V4
from tests.recorded import can_record, check_replays

OPTIONS: dict[str, Any] = {"kv_cache_gb": 0.02, "max_model_len": 1024, "max_num_seqs": 4, "chunk_size": 160}
NUM_TOKENS = 522
NUM_NEW = 24


def save_goldens(root: Path) -> None:
    """A checkpoint with all three kinds of layers and an MTP layer, and transformers' log-probabilities of a prompt."""
    model = tiny_v4.make_model(num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=1, index_topk=64)
    more = tiny_v4.mtp_tensors(model)
    tiny_v4.save(model, root, more=more, num_nextn_predict_layers=1)
    tokens = torch.randint(2, 128, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        log_probs = model(tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
    torch.save((tokens, log_probs), root / "goldens.pt")


def goldens(group: EPGroup, root: str) -> None:
    """Whole, in chunks, and token by token as decodes by rows; across ends of windows, entries and pages."""
    tokens, want = torch.load(f"{root}/goldens.pt")
    ours = load_model(EngineConfig(root, device="cuda", chunk_size=1024), group)
    cases = [(10**9, NUM_TOKENS, 0), (129, NUM_TOKENS, 0), (37, 300, 0), (3, 141, 0), (1, 135, 0), (10**9, 300, 60)]
    worst = 0.0
    for chunk, num, num_decoded in cases:
        got = HybridRunner(ours).log_probs(tokens[:num], chunk, num_decoded=num_decoded).cpu()
        error = (got - want[:num]).abs().max().item()
        print(f"{num} tokens, chunks of {min(chunk, num)}, {num_decoded} decoded: error {error:.1e}", flush=True)
        worst = max(worst, error)
    assert worst < 1e-3, worst
    ours.close()


def other_caches(group: EPGroup, root: str) -> None:
    """Entries and keys that are rounded: as on the CPU, but where a value lies between two codes."""
    tokens, _ = torch.load(f"{root}/goldens.pt")
    both = [load_model(EngineConfig(root, device=device, chunk_size=1024), group) for device in ("cpu", "cuda")]
    for index_cache in ("auto", "fp4"):
        formats = {"dtype": torch.uint8, "index_cache": index_cache}
        want, got = (HybridRunner(m, **formats).log_probs(tokens[:300], num_decoded=30).cpu() for m in both)
        error_T = (got - want).abs().amax(-1)
        print(f"fp8, keys {index_cache}: error {error_T.median():.1e}, at most {error_T.max():.1e}", flush=True)
        assert error_T.median() < 1e-3 and error_T[:100].max() < 0.05, error_T
    for model in both:
        model.close()


def prompts_of(*lengths: int, shared: int = 0) -> list[list[int]]:
    """Of these lengths; all begin with the same `shared` tokens."""
    return [[(7 * i * i + 3 * k * (i >= shared)) % 120 + 2 for i in range(n)] for k, n in enumerate(lengths)]


def generate(group: EPGroup, root: str, device: str, **options: Any) -> tuple[list, int]:
    """Greedy tokens of prompts across ends of pages and of what the indexer leaves alone, then of prompts that go on
    from bookmarks of those and of their answers; and how many drafts were accepted."""
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    with LLM(root, group, device=device, **{**OPTIONS, **options}) as llm:
        prompts = prompts_of(30, 119, 250, 300, 509, 126)
        first = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        again = [[*prompts[3][:280], 7, 8], [*prompts[2], *first[2][:10], 5], [*prompts[4], *first[4][:8], 9]]
        second = [output.outputs[0].token_ids for output in llm.generate(again, params)]
        llm.engine.check_integrity()
        stats = llm.engine.stats()
        if group.size == 1:
            assert stats.num_cached_tokens == 256 + 256 + 512, stats.num_cached_tokens
        if device == "cuda" and options.get("graph_sizes") != () and can_record(llm.engine.model):
            check_replays(llm.engine)
        return first + second, stats.num_accepted_tokens


def same_tokens_as_on_the_cpu(group: EPGroup, root: str) -> None:
    """In float32: recorded steps and launched ones, overlapping or not, drafts; each rank asks the CPU by itself."""
    want, _ = generate(EPGroup.single(), root, "cpu", dtype="float32")
    variants: list[dict[str, Any]] = [{}, {"num_speculative_tokens": 2}]
    if group.size == 1:
        launched = {"graph_sizes": ()}
        variants += [launched, {"overlap_schedule": False}, {"num_speculative_tokens": 1, **launched}]
    for extra in variants:
        got, accepted = generate(group, root, "cuda", dtype="float32", **extra)
        equal = sum(a == b for a, b in zip(got, want))
        print(f"{group.size} ranks, {extra}: {equal} of {len(want)} alike, {accepted} drafts accepted", flush=True)
        assert got == want, (extra, got, want)


def short_of_pages(group: EPGroup, root: str) -> None:
    """Requests that are preempted while steps overlap: the tokens of a CPU that has room for all."""
    prompts, params = prompts_of(250, 240, 245), SamplingParams(max_tokens=275, temperature=0.0, ignore_eos=True)
    answers = []
    for options in ({"device": "cpu"}, {"device": "cuda", "kv_cache_gb": 16.5 * 2**-15, "max_model_len": 768}):
        with LLM(root, group, **{**OPTIONS, "dtype": "float32", **options}) as llm:
            answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            preemptions = llm.engine.stats().num_preemptions
    print(f"{preemptions} preemptions", flush=True)
    assert preemptions > 0 and answers[0] == answers[1]


def answers_questions(group: EPGroup, num: int = 44) -> None:
    """The V4 demo model in bfloat16, whose experts are fp4: plain, with drafts, and with the smallest cache."""
    questions, none = held_out_questions(num, seed=3), []
    prompts = [render(question.messages, question.tools) for question in questions]
    found = {}
    variants: tuple[tuple[str, dict[str, Any]], ...] = (
        ("plain", {}),
        ("drafts", {"num_speculative_tokens": 1}),
        ("fp8, fp4", {"num_speculative_tokens": 2, "kv_cache_dtype": "fp8", "index_cache_dtype": "fp4"}),
    )
    for name, options in variants:
        sizes: Any = {"kv_cache_gb": 0.2, "max_num_seqs": 32, "chunk_size": 512}
        with LLM(DEMO_V4, group, device="cuda", dtype="bfloat16", **sizes, **options) as llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=256, temperature=0))
            accepted = llm.engine.stats().num_accepted_tokens
        found[name] = score(questions, [output.outputs[0].text or "" for output in outputs])["accuracy"]
        print(f"{group.size} GPUs, {name}: {found[name]:.3f} right, {accepted} drafts accepted", flush=True)
        if accepted < num * options.get("num_speculative_tokens", 0):  # the MTP layer was trained: it guesses most
            none.append(name)
    assert min(found.values()) > 0.9 and not none, (found, none)


def dummy_weights(group: EPGroup) -> None:
    """Random weights of the demo model's shape."""
    options = {"device": "cuda", "load_format": "dummy", "num_hidden_layers": 3, "dtype": "bfloat16"}
    model = load_model(EngineConfig(DEMO_V4, chunk_size=1024, **options), group)
    log_probs = HybridRunner(model).log_probs(torch.arange(300) % 600, num_decoded=5)
    assert log_probs.isfinite().all() and log_probs.std() > 0.01
    model.close()
