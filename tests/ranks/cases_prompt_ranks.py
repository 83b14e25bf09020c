"""What test_prompt_ranks.py runs on every rank: prompts that several ranks compute give what one rank computes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest

from eprt import LLM, EPGroup, SamplingParams
from eprt.config import EngineConfig
from eprt.engine import prompt_team
from eprt.engine.engine import Engine
from eprt.ep.errors import EPTimeoutError
from eprt.ep.group.rank_barrier import RankBarrier
from eprt.kv.reader import open_reader
from tests.ranks import cases_views
from tests.ranks.moments import Moments
from tests.ranks.rotated_pages import rotated_pages

VOCAB = 128
KV_GB = 0.02
DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "checkpoint"


def prompts_around(num_ranks: int, longest: int) -> list[list[int]]:
    """Of lengths at which pieces are empty, of one token, or uneven; two begin as another does."""
    rng = random.Random(num_ranks)
    lengths = sorted({1, max(1, num_ranks - 1), num_ranks, num_ranks + 1, 2 * num_ranks + 1, 40, longest})
    prompts = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]
    return [*prompts, prompts[-1][:77] + prompts[-2], prompts[-1][:61]]


def sampled(num: int, max_tokens: int = 5) -> list[SamplingParams]:
    params = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2}
    return [SamplingParams(temperature=0.9 * (i % 2), seed=i, prompt_logprobs=i % 5 == 4, **params) for i in range(num)]


def answers(llm: LLM, prompts: Sequence[Sequence[int]], one_by_one: bool) -> list[dict[str, Any]]:
    """With all log-probabilities, but without what depends on the ranks' caches."""
    params = sampled(len(prompts))
    if one_by_one:
        outputs = [output for each in zip(prompts, params) for output in llm.generate([each[0]], [each[1]])]
    else:
        outputs = llm.generate(prompts, params)
    return [asdict(replace(output, num_cached_tokens=0)) for output in outputs]


def splitting(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What make() makes; its teams split prompts of any length."""
    with patch.object(prompt_team, "_LEAST_TOKENS", 1):
        return make(*arguments, **options)


def run_all(group: EPGroup, directory: str) -> None:
    same_answers(group, directory)
    a_client_leaves(group, directory)
    with rotated_pages():
        a_client_leaves(group, directory)
        numbered_as_on_gpus(group, directory)
    if group.size < 4:
        drafts_change_nothing(group)
        a_rank_is_late(group)


def same_answers(group: EPGroup, directory: str) -> None:
    """Tokens and log-probabilities, to the bit, of prompts one by one, so that the others have nothing else to do, and
    of all at once, in other chunks, pages and types; the second time all begin behind cached pages."""
    for longest, options in (
        (2048, {"chunk_size": 900}),
        (131, {"dtype": "bfloat16", "chunk_size": 23, "page_size": 4, "overlap": "tbo", "hands_over": True}),
        (131, {"chunk_size": 64, "page_size": 4, "max_num_seqs": 4, "kv_cache_gb": 1e-4, "overlap_schedule": True}),
    ):
        prompts = prompts_around(group.size, longest)
        options = {"kv_cache_gb": KV_GB, "max_model_len": longest + 16, **options}
        with LLM(directory, EPGroup.single(), **options) as llm:
            expected = answers(llm, prompts, one_by_one=False)
        with splitting(LLM, directory, group, prompt_ranks=group.size, **options) as llm:
            for one_by_one in (True, False):
                assert answers(llm, prompts, one_by_one) == expected, (options, one_by_one)
                llm.engine.check_integrity()
            stats = llm.engine.stats()
            assert stats.kv_pages_used_now == 0 and not llm.engine.has_work
            assert (stats.num_split_steps > 4) == (group.size > 1), stats.num_split_steps
            if llm.engine.config.hands_over:
                others_read_its_pages(llm.engine)


def numbered_as_on_gpus(group: EPGroup, directory: str) -> None:
    """Each rank numbers its own pages first, hosts are a step ahead, and the team meets once more behind a step."""
    prompts = prompts_around(group.size, 131)
    options = {"chunk_size": 23, "page_size": 4, "kv_cache_gb": KV_GB, "max_model_len": 150, "overlap_schedule": True}
    with LLM(directory, EPGroup.single(), **options) as llm:
        expected = answers(llm, prompts, one_by_one=False)
    with splitting(LLM, directory, group, prompt_ranks=group.size, **options) as llm:
        team = llm.engine.team
        if team is not None:
            team.on_gpu = Mock(wait=team.barrier.wait)
        for one_by_one in (True, False):
            assert answers(llm, prompts, one_by_one) == expected, one_by_one
        llm.engine.check_integrity()
        if team is not None:
            assert team.barrier.epoch > team.num_split_steps * llm.engine.model.config.num_hidden_layers


def others_read_its_pages(engine: Engine) -> None:
    """As other instances do."""
    cache = engine.handoff.require_cache()
    (mine,) = cache.bytes_LPB
    pages = list(range(mine.shape[1]))
    (read,) = into = [np.zeros_like(mine)]
    open_reader(cache.source).read_pages(pages, into, pages)
    assert mine.any() and np.array_equal(read, mine)


def a_client_leaves(group: EPGroup, directory: str) -> None:
    """In the midst of a prompt that is split; the next one takes its pages, and some of what they hold."""
    prompts = prompts_around(group.size, 131)[-3:]
    options = {"kv_cache_gb": 1e-4, "page_size": 4, "chunk_size": 32, "max_model_len": 150}
    with LLM(directory, EPGroup.single(), **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, sampled(3))]
    config = EngineConfig(directory, prompt_ranks=group.size, **options)
    engine = splitting(Engine, config, group)
    tokens: dict[str, list[int]] = {}

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            result = engine.step()
            engine.check_integrity()
            for output in result.outputs:
                tokens.setdefault(output.request_id, []).append(output.token_id)
            if result.all_idle:
                return

    if group.rank == 0:
        engine.add_request("leaves", prompts[0], sampled(1)[0])
    run(2)
    if group.rank == 0:
        assert engine.abort("leaves")
        for i, (prompt, params) in enumerate(zip(prompts, sampled(3))):
            engine.add_request(str(i), prompt, params)
    run(1000)
    assert engine.stats().num_split_steps > 4 and engine.stats().kv_pages_used_now == 0
    assert tokens == ({str(i): tokens for i, tokens in enumerate(expected)} if group.rank == 0 else {})
    engine.close()


def drafts_change_nothing(group: EPGroup) -> None:
    """The MTP layer's entries are of the ranks that compute the tokens, too."""
    texts = ["What is 12 + 30? " * 9, "Count from 3 to 20.", "Spell castle backwards. " * 3, "Sort: pear, fig, plum"]
    tokens, accepted = [], []
    for of, options in (
        (EPGroup.single(), {"num_speculative_tokens": 2}),
        (group, {"num_speculative_tokens": 2, "prompt_ranks": group.size, "chunk_size": 64}),
    ):
        options = {"kv_cache_gb": KV_GB, **options}
        with splitting(LLM, DEMO, of, **options) as llm:
            outputs = [output for text in texts for output in llm.generate(text, SamplingParams(max_tokens=16, seed=1))]
            tokens.append([output.outputs[0].token_ids for output in outputs])
            accepted.append(sum(of.allgather(llm.engine.stats().num_accepted_tokens)))
            llm.engine.check_integrity()
    assert tokens[0] == tokens[1] and accepted[0] == accepted[1] > 0, (tokens, accepted)


def a_rank_is_late(group: EPGroup) -> None:
    """The wait has a deadline, and says who waited, for whom, and in what."""
    moments = Moments(group)
    last = group.size - 1
    barrier = RankBarrier(group, range(group.size), "a meeting")
    for _ in range(3):
        barrier.wait()
    barrier._waiter.timeout_s = 0.1
    if group.rank == last:
        moments.wait("told", range(last))
    else:
        with pytest.raises(EPTimeoutError, match=rf"\[rank {group.rank}/{group.size}\].*rank {last}.*a meeting"):
            barrier.wait()
        moments.tell("told")
    moments.close()
    barrier.close()


def ranks_die(group: EPGroup, **options: Any) -> None:
    """As cases_views has it, while prompts are split."""
    splitting(cases_views.one_after_the_other, group, **options)


def enters_and_leaves(group: EPGroup, **options: Any) -> None:
    splitting(cases_views.enters_and_leaves, group, **options)
