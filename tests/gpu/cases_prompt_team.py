"""What every rank does in test_prompt_team.py: prompts that several GPUs compute give what one GPU computes."""

import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.serving.ranks_in_turns import shape_with
from benchmarks.shapes import DEEPSEEK_V3
from eprt import LLM, EPGroup, SamplingParams
from eprt.engine.prompt_split import ChunkOffer
from eprt.engine.prompt_team import PromptTeam
from eprt.ep.errors import RankLostError
from eprt.gpu.device import take_device
from tests.gpu.cases_model import DEMO
from tests.gpu.seen_prompts import SeenPrompts, require_no_worse
from tests.ranks.cases_prompt_ranks import splitting
from tests.ranks.cases_views import ViewRank, die_in

VOCAB = 640
# Of log-probabilities: cuBLAS sums a product's row in another order where it has other numbers of rows.
FP32_ERROR = 1e-4


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    """The last two begin as another one does."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    return [*prompts, prompts[-1][:150] + prompts[-2], prompts[-1][:200]]


def answer(group: EPGroup, one_by_one: bool, dtype: str, num_tokens: int = 12, **options: Any) -> list[Any]:
    """Tokens and their log-probabilities of all prompts, twice: the second time they find their pages. One by one, the
    other ranks have nothing else to do; two ranks have different ones otherwise."""
    longest = 1200
    prompts = prompts_of([1, 17, 40, 333, longest])
    params = [SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=1, seed=i) for i in range(len(prompts))]
    options = {"kv_cache_gb": 0.05, "max_num_seqs": 8, "graph_sizes": (), "max_model_len": 1400, **options}
    answers = []
    with splitting(LLM, DEMO, group, device="cuda", dtype=dtype, **options) as llm:
        for _ in range(2):
            if one_by_one:
                outputs = [output for each in zip(prompts, params) for output in llm.generate([each[0]], [each[1]])]
            else:
                outputs = llm.generate(prompts, params)
            answers += [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
            llm.engine.check_integrity()
        stats = llm.engine.stats()
        assert stats.kv_pages_used_now == 0 and not llm.engine.has_work
        shares = llm.engine.config.prompt_ranks > 1
        assert (stats.num_split_steps > 0) == shares, stats.num_split_steps
        if shares and options["kv_cache_gb"] < 0.01:
            assert sum(group.allgather(stats.num_preemptions)) > 0
    return answers


def answer_alone(group: EPGroup, *arguments: Any, **options: Any) -> list[Any]:
    """Of one GPU, the first rank's, by itself."""
    mine = answer(EPGroup.single(), *arguments, **options) if group.rank == 0 else None
    return group.allgather(mine)[0]


def compare(name: str, got: list[Any], want: list[Any]) -> None:
    """Log-probabilities as long as all tokens before are the same."""
    equal = differences = num = 0
    worst = 0.0
    for (got_tokens, got_scores), (want_tokens, want_scores) in zip(got, want, strict=True):
        for i, (mine, theirs) in enumerate(zip(got_scores, want_scores, strict=True)):
            num += 1
            equal += mine == theirs
            worst = max(worst, abs(mine - theirs)) if got_tokens[: i + 1] == want_tokens[: i + 1] else worst
            if got_tokens[i] != want_tokens[i]:
                differences += 1
                break
    print(f"{name}: {equal} of {num} log-probabilities equal, largest difference {worst:.2g}, {differences} others")
    assert worst <= FP32_ERROR and not math.isnan(worst), (name, worst)
    assert not differences, (name, got, want)


def answers_in_float32(group: EPGroup, ways: Sequence[str] = ("whole", "chunks", "drafts", "few pages")) -> None:
    """Tokens are the same: one by one, in chunks, all at once, behind cached pages, with drafts, and where requests are
    preempted."""
    few = {"chunk_size": 100, "kv_cache_gb": 0.0019, "page_size": 16, "max_num_seqs": 3, "num_tokens": 60}
    ways_to_compute: dict[str, tuple[bool, dict[str, Any]]] = {
        "whole": (True, {"chunk_size": 1400}),
        "chunks": (False, {"chunk_size": 200, "page_size": 16}),
        "drafts": (True, {"num_speculative_tokens": 2, "chunk_size": 600}),
        "few pages": (False, few),
    }
    for name in ways:
        one_by_one, options = ways_to_compute[name]
        want = answer_alone(group, one_by_one, "float32", **options)
        got = answer(group, one_by_one, "float32", prompt_ranks=group.size, **options)
        compare(f"float32 {name}, {group.size} ranks", got, want)


def answers_in_chunks(group: EPGroup) -> None:
    """In both types; many prompts at once, and again behind cached pages."""
    as_near_to_float32(group, "bfloat16 chunks", False, chunk_size=512)


def answers_in_one_piece(group: EPGroup) -> None:
    """One by one."""
    as_near_to_float32(group, "bfloat16", True, chunk_size=1400)


def answers_with_an_fp8_cache(group: EPGroup) -> None:
    """In chunks, beside decodes."""
    as_near_to_float32(group, "fp8 cache", False, chunk_size=256, kv_cache_dtype="fp8")


def as_near_to_float32(group: EPGroup, name: str, one_by_one: bool, **options: Any) -> None:
    """Split prompts are as near to float32's as those that are not split, in the same engine. In float32 they are the
    same but for the last bits."""
    rng = random.Random(6)
    prompts = prompts_of([1200, *(rng.randrange(40, 500) for _ in range(12))])
    exact, split = seen(group, DEMO, prompts, one_by_one, dtype="float32", chunk_size=options["chunk_size"])
    told = f"{group.size} ranks"
    require_no_worse(f"float32, {told}", split, exact, exact, 2, rounding=FP32_ERROR, slack=0.001)
    usual, split = seen(group, DEMO, prompts, one_by_one, dtype="bfloat16", **options)
    require_no_worse(f"{name}, {told}", split, usual, exact, num_smooth=2)


def entries_of_large_heads(group: EPGroup) -> None:
    """By the attention kernels for DeepSeek-V3's heads, decodes as well: a split prompt's entries are as near to those
    of one chunk as those of several chunks are."""
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 1000) for _ in range(1201)]]
    changes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 256}
    changes |= {"num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 2048, "quantization_config": None}
    changes |= {"n_routed_experts": 16, "n_group": 1, "topk_group": 1}
    options = {"load_format": "dummy", "num_hidden_layers": 4, "dtype": "bfloat16"}
    with shape_with(DEEPSEEK_V3, changes) as directory:
        whole, split = seen(group, directory, prompts, True, chunk_size=1400, **options)
        usual, _ = seen(group, directory, prompts, True, chunk_size=352, **options)
    # On CPUs, other instruction sets change entries of the last layer by 0.017, at most 0.023; a page that is wrong,
    # one at all, by 0.11, at most 1.
    require_no_worse(f"large heads, {group.size} ranks", split, usual, whole, num_smooth=4, rounding=0.05)


def seen(
    group: EPGroup, directory: Path, prompts: Sequence[Sequence[int]], one_by_one: bool, **options: Any
) -> tuple[SeenPrompts, SeenPrompts]:
    """In one engine: prompts that are not split, and then split."""
    begin = time.monotonic()

    def tell(what: str) -> None:
        if group.rank == 0:
            print(f"{options['dtype']}, {time.monotonic() - begin:.1f} s: {what}", flush=True)

    # Few rows in a step of decodes: it is warmed up with fewer numbers of them.
    options = {"max_num_seqs": 8, "low_latency_max_tokens": 8, "graph_sizes": (), "max_model_len": 1400, **options}
    options |= {"device": "cuda", "kv_cache_gb": 0.05, "prompt_ranks": group.size}
    with splitting(LLM, directory, group, **options) as llm:
        tell("the engine has started")
        with patch.object(PromptTeam, "offer", lambda *_: ChunkOffer()):
            usual = SeenPrompts.of(llm, prompts, one_by_one)
        assert llm.engine.stats().num_split_steps == 0
        tell("prompts that are not split")
        llm.engine.scheduler.pool.forget_cached()
        split = SeenPrompts.of(llm, prompts, one_by_one)
        assert llm.engine.stats().num_split_steps > 0
        tell("split prompts")
        llm.engine.check_integrity()
    return usual, split


def a_rank_dies(group: EPGroup, folder: str) -> None:
    """The last rank is killed while it computes part of a prompt: the others, which wait for it on their GPUs, go on
    without it. Their first tokens are those of a run in which nobody dies, up to bfloat16's rounding."""
    last = group.size - 1
    options = {"device": "cuda", "dtype": "bfloat16", "graph_sizes": (), "max_model_len": 1400, "chunk_size": 512}
    options |= {"num_redundant_experts": 32, "max_num_seqs": 4, "kv_cache_gb": 0.05, "page_size": 16}
    prompts = prompts_of([900, 700])
    params = [SamplingParams(max_tokens=8, temperature=0, ignore_eos=True) for _ in prompts]
    want = []
    if group.rank == 0:
        with LLM(DEMO, EPGroup.single(), **{**options, "num_redundant_experts": 0}) as llm:
            want = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    rank = splitting(ViewRank, group, str(DEMO), folder, prompt_ranks=group.size, **options)
    rank.engine.membership.watch_losses()
    if group.rank == 0:
        rank.all = {str(i): given for i, given in enumerate(zip(prompts, params))}
        for request_id in rank.all:
            rank.add(request_id, [])
    else:
        rank.keep([])
    if group.rank == last:
        die_in(rank, "entries")
    try:
        rank.run()
    except RankLostError as error:
        assert f"rank {last} died" in str(error), error
    else:
        raise AssertionError(f"rank {last} was not killed")
    assert rank.engine.team.num_split_steps > 0
    rank.change_view(group.view.without(last))
    rank.run()
    rank.engine.check_integrity()
    if group.rank == 0:
        got = [rank.tokens[str(i)] for i in range(len(prompts))]
        assert list(map(len, got)) == list(map(len, want)), (got, want)
        same = sum(mine[0] == theirs[0] for mine, theirs in zip(got, want))
        print(f"{same} of {len(want)} first tokens are the same")
        assert same >= len(want) - 1, (got, want)
    print("WENT ON", json.dumps(rank.engine.stats().num_split_steps), flush=True)


def rows_of_products(group: EPGroup) -> None:
    """Tells which operators give a row other bits where there are more rows. Checks nothing."""
    take_device("cuda", group)
    generator = torch.Generator("cuda").manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        for n, k in ((1536, 7168), (24576, 1536), (7168, 16384), (18432, 7168), (608, 256), (384, 96)):
            w = torch.randn(n, k, generator=generator, device="cuda", dtype=torch.float32).to(dtype)
            x = torch.randn(4096, k, generator=generator, device="cuda", dtype=torch.float32).to(dtype)
            whole = x @ w.T
            same = [rows for rows in (16, 33, 64, 128, 500, 1024, 2048) if torch.equal(x[:rows] @ w.T, whole[:rows])]
            print(f"{dtype} {n} x {k}: rows of 4096 have the bits that they have among {same} rows")
            del w, x, whole
