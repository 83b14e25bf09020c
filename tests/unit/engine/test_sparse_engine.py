"""DeepSeek-V3.2 in the engine: chunks, prefix hits, preemption, drafts and their number, recorded steps."""

from contextlib import nullcontext

import pytest
import torch

from eprt import LLM, SamplingParams
from tests import tiny
from tests.recorded import steps_recorded
from tests.tiny_mtp import DraftingModel

TOP_K, NUM_NEW = 48, 16
OPTIONS = {"kv_cache_gb": 0.01, "max_model_len": 320, "page_size": 4, "chunk_size": 300}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The checkpoint with its MTP layer; the oracle; prompts; their greedy tokens; (number of drafts, prompt) -> how
    many of each step's hold."""
    model = DraftingModel(index_topk=TOP_K, max_position_embeddings=320)
    prompts = tiny.prompts(lengths=(30, 129, 255), seed=5)
    tokens = [tiny.golden_greedy(model.model, prompt, NUM_NEW) for prompt in prompts]
    held = {(k, i): model.accepted(prompts[i], tokens[i], k) for k in (1, 2) for i in range(len(prompts))}
    return model.save(tmp_path_factory.mktemp("v32")), model, prompts, tokens, held


def generate(golden, prompts, num_new: int = NUM_NEW, **options):
    directory, *_ = golden
    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=True)
    with LLM(directory, **{**OPTIONS, **options}) as llm:
        outputs = llm.generate(prompts, params)
        llm.engine.check_integrity()
        return outputs, llm.engine.stats()


def check(golden, outputs, prompts) -> None:
    """Tokens, and log-probabilities of them and of the prompts."""
    model = golden[1].model
    for prompt, output in zip(prompts, outputs):
        answer = output.outputs[0]
        tokens = [*prompt, *answer.token_ids]
        logprobs = tiny.golden_logits(model, tokens[:-1]).log_softmax(-1)
        of_next = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert torch.equal(logprobs[len(prompt) - 1 :].argmax(-1), torch.tensor(answer.token_ids))
        got = [*(each[0] for each in output.prompt_logprobs), *answer.logprobs]
        assert (torch.tensor(got) - of_next).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [3, 37, 128, 129])
def test_chunks(golden, chunk):
    prompts = golden[2]
    outputs, _ = generate(golden, prompts, chunk_size=chunk, max_num_seqs=3)
    check(golden, outputs, prompts)


def test_prefix_hits(golden):
    """The second prompt shares pages with the first, index keys among them, below and above top_k."""
    prompts = golden[2]
    shared = [[*prompts[2][:num], *prompts[1][:29]] for num in (40, 128, 200)]
    for together in ([prompts[2], *shared], shared):
        with LLM(golden[0], **OPTIONS) as llm:
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
            outputs = [llm.generate([prompt], params)[0] for prompt in together]
            cached = llm.engine.stats().num_cached_tokens
        assert cached == sum((40, 128, 200)) if together is not shared else cached > 0
        for prompt, output in zip(together, outputs):
            assert output.outputs[0].token_ids == tiny.golden_greedy(golden[1].model, prompt, 8)


@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 37}, {"recorded": True}], ids=["whole", "chunks", "recorded"])
def test_drafts_are_the_oracles(golden, num_drafts, options):
    """The same tokens as without, and as many accepted as the oracle says: its drafts are made without a cache."""
    directory, _, prompts, tokens, held = golden
    options = {**OPTIONS, **options, "num_speculative_tokens": num_drafts}
    recorded = options.pop("recorded", False)
    with LLM(directory, **options) as llm, steps_recorded(llm.engine) if recorded else nullcontext():
        for i, (prompt, want) in enumerate(zip(prompts, tokens)):
            before = llm.engine.stats().num_accepted_tokens
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=len(want), temperature=0.0, ignore_eos=True))
            assert output.outputs[0].token_ids == want
            accepted, counts = llm.engine.stats().num_accepted_tokens - before, held[num_drafts, i]
            assert sum(counts) > 0 and 0 <= sum(counts) - accepted <= counts[-1], "the last step may be cut short"
        llm.engine.check_integrity()
        if recorded:
            assert llm.engine.drafter is not None
            for graphs in (llm.engine.runner.graphs, llm.engine.drafter.graphs):
                assert graphs is not None and min(graphs.num_replays_by_context) > 0, "short contexts and long ones"


def test_preempted_requests_go_on_as_before(golden):
    prompts = tiny.prompts(lengths=(30, 31, 32), seed=6)
    outputs, stats = generate(golden, prompts, num_new=60, kv_cache_gb=8.5e-5, max_num_seqs=3)
    assert stats.num_preemptions > 0
    check(golden, outputs, prompts)


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_other_formats_serve(golden, options):
    """With drafts and without: the same tokens; the prompts' log-probabilities are near to those of float32."""
    prompts = golden[2]
    (plain, _), (drafted, stats) = (generate(golden, prompts, num_speculative_tokens=n, **options) for n in (0, 2))
    got = [[output.outputs[0].token_ids for output in outputs] for outputs in (plain, drafted)]
    assert got[0] == got[1] and stats.num_accepted_tokens > 0
    for prompt, output in zip(prompts, plain):
        logprobs = tiny.golden_logits(golden[1].model, prompt).log_softmax(-1)
        want = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert (torch.tensor([each[0] for each in output.prompt_logprobs or ()]) - want).abs().median() < 0.2
