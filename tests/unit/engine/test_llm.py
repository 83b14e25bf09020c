"""LLM on one rank with real checkpoints: tokens as transformers', seeded, whatever the batch; text and stop strings."""

import random

import numpy as np
import pytest

from eprt import LLM, SamplingParams
from eprt.engine.engine import Engine
from tests import tiny

VOCAB = 320
TEXTS = ["the quick brown fox jumps over", "les élèves ont déjà mangé", "0 1 2 3", "数字と文字 🙂 mixed"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A DeepSeek V3 model with a byte-level tokenizer, every id of which has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory = tiny.save(tiny.make_model("v3", vocab_size=VOCAB), tmp_path_factory.mktemp("v3"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    for i in range(tokenizer.get_vocab_size(), VOCAB):
        tokenizer.add_tokens([f"word{i}"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, kv_cache_gb=0.01) as llm:
        yield llm
        llm.engine.check_integrity()


def token_ids(outputs) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_greedy_equals_transformers(kind, tmp_path):
    hf_model = tiny.make_model(kind)
    prompts = tiny.prompts()
    golden = [tiny.golden_greedy(hf_model, prompt, 10) for prompt in prompts]
    tiny.save(hf_model, tmp_path)
    for options in ({}, {"chunk_size": 7, "page_size": 4}):
        with LLM(tmp_path, kv_cache_gb=0.01, **options) as llm:
            for _ in range(2):  # the second time with the prefixes cached
                outputs = llm.generate(prompts, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
                assert [output.outputs[0].token_ids for output in outputs] == golden, options
            assert outputs[2].num_cached_tokens >= 32


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    prompts = tiny.prompts(VOCAB, (1, 7, 40, 23, 60, 5, 33, 40))
    prompts[7] = prompts[2][:36] + prompts[7][:4]
    options = (
        {"temperature": 0.0},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
        {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1.0, "logit_bias": {7: 5.0, 8: -100.0}},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": True},
    )
    return [
        (prompt, SamplingParams(max_tokens=16, ignore_eos=True, seed=100 + i, **option))
        for i, (prompt, option) in enumerate(zip(prompts, options))
    ]


def test_tokens_depend_on_nothing_but_the_request(llm, checkpoint):
    """Alone, together, in another order, in small chunks, preempted, without a prefix cache: always the same."""
    requests = mixed_requests()
    alone = [token_ids(llm.generate(prompt, params))[0] for prompt, params in requests]
    together = llm.generate([p for p, _ in requests], [params for _, params in requests])
    assert token_ids(together) == alone
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    shuffled = llm.generate([requests[i][0] for i in order], [requests[i][1] for i in order])
    assert token_ids(shuffled) == [alone[i] for i in order]
    page_bytes = 3 * 4 * 40 * 4
    for options in (
        {"chunk_size": 9, "enable_prefix_cache": False},
        {"chunk_size": 1000, "max_num_seqs": 2},
        {"chunk_size": 32, "page_size": 4, "kv_cache_gb": 30 * page_bytes / 2**30},
    ):
        with LLM(checkpoint, **{"kv_cache_gb": 0.01, **options}) as other:
            again = other.generate([p for p, _ in requests], [params for _, params in requests])
            assert token_ids(again) == alone, options
            other.engine.check_integrity()
            if "page_size" in options:
                assert other.engine.stats().num_preemptions > 0


def test_logprobs_agree_with_transformers(tmp_path):
    hf_model = tiny.make_model("v3")
    prompt = tiny.prompts()[3]
    params = SamplingParams(max_tokens=5, temperature=1, seed=1, logprobs=2, prompt_logprobs=True, ignore_eos=True)
    with LLM(tiny.save(hf_model, tmp_path), kv_cache_gb=0.01, chunk_size=10) as llm:
        (output,) = llm.generate([prompt], params)
    completion = output.outputs[0]
    want_TV = tiny.golden_logits(hf_model, prompt + completion.token_ids).log_softmax(dim=-1)
    assert output.prompt_logprobs is not None and completion.logprobs is not None
    values = [value for value, _ in output.prompt_logprobs] + completion.logprobs
    following = prompt[1:] + completion.token_ids
    assert values == pytest.approx([float(want_TV[i, t]) for i, t in enumerate(following)], abs=1e-4)
    assert completion.top_logprobs is not None
    assert [[t for t, _ in top] for top in completion.top_logprobs] == want_TV[len(prompt) - 1 : -1].topk(
        2
    ).indices.tolist()


def test_text_prompts_and_seeds(llm, checkpoint):
    outputs = llm.generate(TEXTS, SamplingParams(max_tokens=20, n=2, ignore_eos=True))
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt == text and output.prompt_token_ids == llm.tokenizer.encode(text)
        assert [completion.index for completion in output.outputs] == [0, 1]
        for completion in output.outputs:
            assert len(completion.token_ids) == 20 and completion.finish_reason == "length"
            assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert outputs[0].outputs[0].token_ids != outputs[0].outputs[1].token_ids
    # Drawn seeds come from the engine's: a fresh LLM repeats the program, the same LLM does not repeat itself.
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(checkpoint, kv_cache_gb=0.01) as first, LLM(checkpoint, kv_cache_gb=0.01) as second:
        runs = [token_ids(llm.generate([3, 4], params)) for llm in (first, first, second)]
    assert runs[0] == runs[2] != runs[1]


def test_stop_strings_end_the_text_before_them(llm):
    params = SamplingParams(max_tokens=40, temperature=1, seed=5, ignore_eos=True)
    (whole,) = llm.generate(TEXTS[0], params)
    text, tokens = whole.outputs[0].text, whole.outputs[0].token_ids
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    begin = text.index(stop)
    (output,) = llm.generate(
        TEXTS[0], SamplingParams(max_tokens=40, temperature=1, seed=5, ignore_eos=True, stop=("never there", stop))
    )
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason) == (text[:begin], "stop")
    assert completion.token_ids == tokens[: len(completion.token_ids)] and len(completion.token_ids) < 40
    # It stopped at the token that completes the stop string, not later.
    assert stop not in llm.tokenizer.decode(completion.token_ids[:-1])
    assert stop in llm.tokenizer.decode(completion.token_ids)
    assert not llm.engine.has_work


def test_an_ending_token_is_no_text(llm):
    params = SamplingParams(max_tokens=20, temperature=1, seed=6, ignore_eos=True)
    tokens = llm.generate(TEXTS[0], params)[0].outputs[0].token_ids
    stop = next(t for i, t in enumerate(tokens) if i > 3 and tokens.index(t) == i)
    stopped = SamplingParams(max_tokens=20, temperature=1, seed=6, ignore_eos=True, stop_token_ids=(stop,))
    completion = llm.generate(TEXTS[0], stopped)[0].outputs[0]
    assert completion.token_ids == tokens[: tokens.index(stop) + 1] and completion.finish_reason == "stop"
    assert completion.text == llm.tokenizer.decode(completion.token_ids[:-1])


def test_stream_gives_the_same_in_pieces(llm):
    params = SamplingParams(max_tokens=15, temperature=1, seed=7, n=2, ignore_eos=True)
    whole = llm.generate(TEXTS, params)
    texts, tokens, reasons = {}, {}, {}
    for piece in llm.stream(TEXTS, params):
        key = (piece.prompt_idx, piece.sample_idx)
        assert key not in reasons, "a piece after the last"
        texts[key] = texts.get(key, "") + piece.text
        tokens.setdefault(key, []).append(piece.token_id)
        if piece.finish_reason:
            reasons[key] = piece.finish_reason
    for prompt_idx, output in enumerate(whole):
        for completion in output.outputs:
            key = (prompt_idx, completion.index)
            assert (texts[key], tokens[key], reasons[key]) == (
                completion.text,
                completion.token_ids,
                completion.finish_reason,
            )


def test_leaving_a_stream_early_frees_everything(llm):
    for piece in llm.stream(TEXTS, SamplingParams(max_tokens=50, ignore_eos=True)):
        if piece.prompt_idx == 2:
            break
    assert not llm.engine.has_work and llm.engine.stats().kv_pages_used_now == 0
    llm.engine.check_integrity()
    assert len(llm.generate("0 1", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_a_stream_that_was_left_and_lives_on_does_not_disturb_the_next_call(llm, caplog):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    left = llm.stream([TEXTS[0]] * 3, params)
    next(left)
    again = llm.stream([TEXTS[1]], params)
    tokens = [piece.token_id for piece in again]
    assert "was not read to its end" in caplog.text and list(left) == []
    caplog.clear()
    (output,) = llm.generate([TEXTS[1]], params)
    assert output.outputs[0].token_ids == tokens and not caplog.text
    assert not llm.engine.has_work


def test_bad_calls_name_what_is_wrong(llm, tmp_path):
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        llm.generate([[1], []])
    with pytest.raises(ValueError, match=f"prompt 0: prompt token {VOCAB} is outside the vocabulary"):
        llm.generate([[VOCAB]])
    for no_prompt in ([1.5], ["a"], b"x", None):
        with pytest.raises(ValueError, match="prompt 0: a prompt is a text or a list of token ids"):
            llm.generate([no_prompt])
    for no_prompts in (5, None, b"x", {"prompt": "x"}):
        with pytest.raises(ValueError, match=r"prompts is .*; give one or many, each a text or a list of token ids"):
            llm.generate(no_prompts)
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        llm.generate([[1], [2]], [SamplingParams()])
    for no_params in ({"max_tokens": 3}, [SamplingParams(), None], 7):
        with pytest.raises(ValueError, match=r"prompt [01]: sampling_params is .*; give a SamplingParams"):
            llm.generate([[1], [2]], no_params)
    few = SamplingParams(max_tokens=2, temperature=0)
    assert token_ids(llm.generate(np.array([5, 6]), few)) == token_ids(llm.generate([[5, 6]], few))
    assert llm.generate([]) == [] and not llm.engine.has_work
    with LLM(tiny.save(tiny.make_model("v3"), tmp_path), kv_cache_gb=0.01) as bare:
        with pytest.raises(ValueError, match=r"prompt 0: a text prompt needs the checkpoint's tokenizer\.json"):
            bare.generate("hello")
        with pytest.raises(ValueError, match=r"prompt 0: stop strings need the checkpoint's tokenizer\.json"):
            bare.generate([1, 2], SamplingParams(stop=("x",)))
        assert bare.generate([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].text is None
    with pytest.raises(TypeError, match="no_such_option"):
        LLM(tmp_path, no_such_option=1)
    with pytest.raises(ValueError, match=r"max_queue=2: .* leave it out"):
        LLM(tmp_path, max_queue=2)


def test_an_interrupted_call_does_not_disturb_the_next(llm, monkeypatch):
    """Ctrl-C between two steps, as in a notebook: the engine is whole, and what it still had to do is dropped."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (whole,) = llm.generate(TEXTS[1], params)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("eprt.engine.llm.Piece", raise_interrupt)
        llm.generate(TEXTS, params)
    assert not llm.engine.scheduler.has_requests
    assert llm.generate(TEXTS[1], params)[0].outputs == whole.outputs
    llm.engine.check_integrity()


def raise_interrupt(*_):
    raise KeyboardInterrupt


def test_a_closed_llm_says_so(checkpoint):
    with LLM(checkpoint, kv_cache_gb=0.01) as closed:
        left = closed.stream([3, 4])
        next(left)
    closed.close()
    left.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this engine is closed: make a new one"):
            closed.generate([3, 4])


def test_more_prompts_than_any_queue(llm):
    assert isinstance(llm.engine, Engine)
    prompts = [[i % VOCAB, 3] for i in range(400)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(len(output.outputs[0].token_ids) == 1 for output in outputs)
