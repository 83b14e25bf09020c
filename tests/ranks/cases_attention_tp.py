"""What test_attention_tp.py runs on every rank: ranks that share attention give what one rank computes alone."""

import os
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from eprt import LLM, EPGroup, SamplingParams
from eprt.config import EngineConfig
from eprt.engine.engine import Engine
from eprt.engine.memory_plan import MemoryPlan
from eprt.engine.structured_outputs import StructuredOutputs
from eprt.ep.errors import RankLostError
from eprt.layers.attention_team import AttentionTeam
from eprt.layers.mla import MLA
from eprt.layers.split_mla import SplitMLA
from eprt.models.checkpoint import TensorSource
from eprt.models.deepseek import DeepseekModel
from tests.ranks.cases_prompt_ranks import others_read_its_pages, splitting
from tests.unit.engine.test_memory_plan import bytes_of

VOCAB = 128
KV_GB = 0.02
DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "checkpoint"


def make_prompts(num_ranks: int, longest: int = 131) -> list[list[int]]:
    """Short and long ones, more than there are ranks; two begin as another does."""
    rng = random.Random(num_ranks)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in (1, 2, num_ranks + 1, 40, longest)]
    return [*prompts, prompts[-1][:77] + prompts[-2], prompts[-1][:61]]


def answers(llm: LLM, prompts: Sequence[Sequence[int]], one_by_one: bool = False) -> list[dict[str, Any]]:
    """With all log-probabilities, but without what depends on the ranks' caches."""
    given = {"max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    kinds = [{}, {"temperature": 0.9, "prompt_logprobs": 1}, {"temperature": 0.7, "frequency_penalty": 0.5}]
    params = [SamplingParams(**{"temperature": 0.0, **kinds[i % 3]}, seed=i, **given) for i in range(len(prompts))]
    if one_by_one:
        outputs = [output for each in zip(prompts, params) for output in llm.generate([each[0]], [each[1]])]
    else:
        outputs = llm.generate(prompts, params)
    return [asdict(replace(output, num_cached_tokens=0)) for output in outputs]


def run_all(group: EPGroup, directory: str, size: int) -> None:
    same_answers(group, directory, size)
    holds_its_share(group, directory, size)
    sums_are_always_the_same(group, directory, size)
    if group.size == 2:
        drafts_and_forms_change_nothing(group)
        a_rank_dies(group, directory)


def same_answers(group: EPGroup, directory: str, size: int) -> None:
    """Tokens and log-probabilities, to the bit, one by one, so that the other ranks have nothing else, and all at once:
    in chunks, in other types, with preemptions, with prompts that are split, too."""
    for options, more in (
        ({"chunk_size": 64, "page_size": 4, "max_num_seqs": 4, "kv_cache_gb": 1e-4}, {"overlap_schedule": True}),
        ({"dtype": "bfloat16", "chunk_size": 23, "overlap": "tbo"}, {"prompt_ranks": size, "hands_over": True}),
    ):
        prompts = make_prompts(group.size)
        options = {"kv_cache_gb": KV_GB, "max_model_len": 147, **options}
        with LLM(directory, EPGroup.single(), **options) as llm:
            expected = answers(llm, prompts)
        with splitting(LLM, directory, group, attention_tp=size, **options, **more) as llm:
            for one_by_one in (True, False):
                assert answers(llm, prompts, one_by_one) == expected, (options, one_by_one)
                llm.engine.check_integrity()
            assert llm.engine.stats().kv_pages_used_now == 0 and not llm.engine.has_work
            assert llm.engine.model.attention_us() is None, "it would be other ranks' tokens', too"
            if llm.engine.config.hands_over:
                others_read_its_pages(llm.engine)


def holds_its_share(group: EPGroup, directory: str, size: int) -> None:
    """Of heads' weights each rank has its part, and no more, and has read no more of their files."""
    options = {"max_model_len": 147, "kv_cache_gb": KV_GB}
    with LLM(directory, group, **options) as llm:
        whole, all_read = [layer.attention for layer in model_of(llm).layers], bytes_read(llm)
    num_heads = whole[0].config.num_attention_heads
    most = (-(-num_heads // size) + 0.5) / num_heads
    for form in ("gather", "reduce"):
        engine = EngineConfig(directory, attention_tp=size, attention_tp_form=form, **options)
        with LLM(directory, group, attention_tp=size, attention_tp_form=form, **options) as llm:
            model, saved = model_of(llm), 0
            for mine, of_one in zip((layer.attention for layer in model.layers), whole, strict=True):
                assert isinstance(mine, SplitMLA)
                assert sum(group.allgather(mine.split.head_bytes)) == head_bytes(of_one) * (group.size // size)
                assert mine.split.head_bytes <= head_bytes(of_one) * most, form
                saved += head_bytes(of_one) - mine.split.head_bytes
                mine.team = None  # type: ignore[assignment]  # its memory is no weight
            held = bytes_of(model.embed_VH, model.layers, model.norm, model.lm_head)
            planned = MemoryPlan.for_rank(engine, group.size).dense
            assert held == planned if num_heads % size == 0 else held <= planned
            assert saved > 0
            if form == "gather" and whole[0].weights.o.weight.scale is None:  # else keys and values are expanded
                assert all_read - bytes_read(llm) >= saved


def model_of(llm: LLM) -> DeepseekModel:
    assert isinstance(llm.engine.model, DeepseekModel)
    return llm.engine.model


def bytes_read(llm: LLM) -> int:
    source = model_of(llm).expert_source
    assert source is not None
    return source._checkpoint.num_bytes_read


def head_bytes(layer: MLA) -> int:
    """Of a rank with all heads: queries, keys and values, output."""
    w, config = layer.weights, layer.config
    if w.q_b is None:
        queries = [w.qkv_a.parts[0].weight.data[: config.num_attention_heads * config.qk_head_dim]]
    else:
        queries = [w.q_b.weight.data, w.q_b.weight.scale]
    tensors = [*queries, w.w_kv_b, w.o.weight.data, w.o.weight.scale]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def sums_are_always_the_same(group: EPGroup, directory: str, size: int) -> None:
    """In the form "reduce", whatever else is computed, and close to what one rank computes."""
    prompts, options = make_prompts(group.size), {"kv_cache_gb": KV_GB, "max_model_len": 147}
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(directory, EPGroup.single(), **options) as llm:
        expected = [output.prompt_logprobs for output in llm.generate(prompts, params)]
    with LLM(directory, group, attention_tp=size, attention_tp_form="reduce", **options) as llm:
        given = [output.prompt_logprobs for output in llm.generate(prompts, params)]
        assert answers(llm, prompts, one_by_one=True) == answers(llm, prompts)
    for of_one, of_team in zip(expected, given, strict=True):
        assert np.allclose([score for score, _ in of_one or ()], [score for score, _ in of_team or ()], atol=1e-3)


def of_fp8(group: EPGroup, directory: str) -> None:
    """And what --quantization int8 makes of it."""
    same_answers(group, directory, 2)
    holds_its_share(group, directory, 2)
    sums_are_always_the_same(group, directory, 2)
    prompts, options = make_prompts(2), {"quantization": "int8", "kv_cache_gb": KV_GB, "max_model_len": 147}
    with LLM(directory, EPGroup.single(), **options) as llm:
        expected = answers(llm, prompts)
    with LLM(directory, group, attention_tp=2, **options) as llm:
        assert answers(llm, prompts) == expected
    with LLM(directory, group, attention_tp=2, attention_tp_form="reduce", **options) as llm:
        assert answers(llm, prompts, one_by_one=True) == answers(llm, prompts)


def drafts_and_forms_change_nothing(group: EPGroup) -> None:
    """Drafts of the MTP layer, whose heads are shared too; answers that must have a form."""
    texts = ["What is 12 + 30? " * 9, "Count from 3 to 20.", "Spell castle backwards. " * 3, "Sort: pear, fig, plum"]
    params = [SamplingParams(max_tokens=16, seed=1, temperature=0.6 * (i % 2)) for i in range(len(texts))]
    params[3] = replace(params[3], structured_outputs=StructuredOutputs(regex="[a-f]{3}, [0-9]+"))
    tokens, accepted = [], []
    for of, options in ((EPGroup.single(), {}), (group, {"attention_tp": 2})):
        with LLM(DEMO, of, kv_cache_gb=KV_GB, num_speculative_tokens=2, chunk_size=64, **options) as llm:
            outputs = llm.generate(texts, params)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            accepted.append(sum(of.allgather(llm.engine.stats().num_accepted_tokens)))
            llm.engine.check_integrity()
    assert tokens[0] == tokens[1] and accepted[0] == accepted[1] > 0, (tokens, accepted)


def a_rank_dies(group: EPGroup, directory: str) -> None:
    """While others wait for its heads: they say so. Other ranks cannot take its part, and that is said before."""
    engine = Engine(EngineConfig(directory, attention_tp=2, kv_cache_gb=KV_GB, max_model_len=147), group)
    with pytest.raises(ValueError, match=r"ranks \(0, 1\) share attention \(--attention-tp\), and nobody else has"):
        engine.membership.require_changeable()
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    meets = []

    def meet(team: AttentionTeam) -> None:
        meets.append(team)
        if group.rank == 1 and len(meets) == 5:
            os._exit(0)
        team._barrier.wait()

    with (
        patch.object(AttentionTeam, "meet", meet),
        pytest.raises(RankLostError, match=r"rank 1 .*attention by heads|attention by heads.*rank 1"),
    ):
        engine.step()


def refused(group: EPGroup, directory: str, v32: str) -> None:
    """Before anything is loaded, on all ranks."""
    with patch.object(TensorSource, "read") as read:
        for model_dir, size, what in (
            (directory, group.size - 1, f"{group.size} ranks make no teams of {group.size - 1}; take a multiple"),
            (directory, group.size, "this model has 2 heads: must be in 1..2, so that each rank has some"),
            (v32, group.size, "not with V3.2, whose attention has an indexer; leave it out"),
        ):
            with pytest.raises(ValueError, match=f"--attention-tp {size}: .*{re.escape(what)}"):
                Engine(EngineConfig(model_dir, attention_tp=size), group)
        assert not read.called
