"""Which GPUs instances get, and by which arithmetic they are refused."""

from types import SimpleNamespace

import pytest

from eprt.serve.gpu_shares import choose_gpus, why_no_room

GPUS = ("a", "b", "c")


def plan(num_prefill: int, prefill_ranks: int, num_decode: int, decode_ranks: int):
    return SimpleNamespace(
        num_prefill=num_prefill,
        prefill_ranks=prefill_ranks,
        num_decode=num_decode,
        decode_ranks=decode_ranks,
        total_ranks=num_prefill * prefill_ranks + num_decode * decode_ranks,
    )


@pytest.mark.parametrize(
    "num_ranks, taken, per_gpu, chosen",
    [
        (1, "", 1, "a"),
        (2, "a", 1, "bc"),
        (1, "ab", 1, "c"),
        (1, "bc", 1, "a"),
        (3, "", 2, "abc"),
        (3, "ab", 2, "cab"),
        (2, "abcc", 2, "ab"),
        (2, "ax", 1, "bc"),
    ],
)
def test_gpus_with_the_fewest_ranks_go_first(num_ranks, taken, per_gpu, chosen):
    assert choose_gpus(num_ranks, GPUS, taken, per_gpu) == tuple(chosen)


@pytest.mark.parametrize(
    "num_ranks, taken, per_gpu, words",
    [
        (1, "abc", 1, "an instance of 1 rank needs room on as many GPUs: of 3 GPUs, other instances' ranks have 3, "),
        (2, "ab", 1, "an instance of 2 ranks .* have 2, which leaves 1; retire one first"),
        (3, "abca", 2, "of 3 GPUs, 2 ranks on each, other instances' ranks have 4, which leaves 2"),
    ],
)
def test_an_instance_without_gpus_is_refused(num_ranks, taken, per_gpu, words):
    with pytest.raises(ValueError, match=words):
        choose_gpus(num_ranks, GPUS, taken, per_gpu)


def test_more_ranks_than_gpus_are_refused_with_the_arithmetic():
    assert why_no_room(plan(1, 2, 1, 2), 4, 1) == "" == why_no_room(plan(1, 1, 1, 1), 1, 2)
    assert why_no_room(plan(2, 1, 2, 2), 4, 1) == (
        "--prefill 2 --prefill-ranks 1 --decode 2 --decode-ranks 2: 2 x 1 + 2 x 2 = 6 ranks on 4 GPUs; each rank needs "
        "a GPU: take fewer instances or ranks (EPRT_RANKS_PER_GPU lets ranks share one, for tests)"
    )
    assert why_no_room(plan(0, 1, 2, 1), 1, 1).startswith("--decode 2 --decode-ranks 1: 2 x 1 = 2 ranks on 1 GPU; each")
    assert "1 x 1 + 2 x 1 = 3 ranks on 1 GPU, 2 on each; each" in why_no_room(plan(1, 1, 2, 1), 1, 2)
