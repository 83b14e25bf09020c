"""What every rank does in test_deep_ep.py: a combine of DeepEP's face that starts before its rows exist."""

import random
import time

import torch

from eprt.ep.errors import EPError, EPTimeoutError
from eprt.ep.group.group import EPGroup
from eprt.ep.reference import SentTokens
from tests.gpu.cases_deep_ep_low_latency import Step, make_buffer, make_config, tokens_of
from tests.gpu.cases_deep_ep_low_latency_lost_ranks import query


def tiles(group: EPGroup) -> None:
    """overlap: rows appear tile by tile while combine sends; then a tile that never comes is named."""
    rng, block_m, threshold = random.Random(9), 16, 5
    for exact in (False, True):
        buffer = make_buffer(group, exact_combine=exact)
        config = make_config(group, (2048, 6, 4, 48), False, exact)
        for skew in ("uniform", "one_rank", "masked"):
            step = Step(group, buffer, config, tokens_of(rng, group, config, skew), "hook")
            told = {} if skew == "masked" else {"topk_weights": step.mine.topk_weights_TK}
            step.dispatch(**told)()
            step.check_received()
            whole, counts = step.outputs(), step.count.tolist()
            y = torch.full_like(whole, float("nan"))
            slot_tiles = -(-step.per_expert // block_m)
            counter = torch.zeros(step.local * slot_tiles, dtype=torch.int32, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                hook = step.combine(
                    y,
                    overlap=True,
                    packed_recv_count=step.count,
                    comp_signal=counter,
                    block_m=block_m,
                    threshold=threshold,
                    num_sms=3,
                )
            todo = [(e, m) for e in range(step.local) for m in range(-(-counts[e] // block_m))]
            random.Random(group.rank).shuffle(todo)  # ranks have different numbers of tiles
            for e, m in todo:
                rows = slice(m * block_m, min(counts[e], (m + 1) * block_m))
                y[e, rows] = whole[e, rows]
                counter[e * slot_tiles + m] = threshold + m % 2  # at or past the threshold
            hook()
            torch.cuda.synchronize()
            step.check_combined()
        buffer.destroy()
    missing_tile(group)


def missing_tile(group: EPGroup) -> None:
    buffer = make_buffer(group, timeout_s=1.0)
    config = make_config(group, (2048, 6, 4, 48), False, False)
    x = torch.ones(5, 2048, dtype=torch.bfloat16, device="cuda")
    idx = torch.tensor([[1, -1, -1, -1]] * 5, device="cuda")  # of rank 0
    everyone = [SentTokens(x, idx, torch.ones(5, 4, dtype=torch.float32, device="cuda"))] * group.size
    step = Step(group, buffer, config, everyone, "hook")
    step.dispatch()()
    y = torch.zeros(6, step.per_expert, 2048, dtype=torch.bfloat16, device="cuda")
    counter = torch.zeros(6, dtype=torch.int32, device="cuda")
    started = time.monotonic()
    step.combine(y, overlap=True, comp_signal=counter, block_m=step.per_expert, threshold=3)()
    torch.cuda.synchronize()
    assert time.monotonic() - started < 10, "the deadline did not end the wait"
    try:
        step.dispatch()
        raise AssertionError("nothing was raised")
    except EPError as error:
        if group.rank == 0:
            assert "tile 1: signal 0, threshold 3" in str(error), error
        else:
            assert isinstance(error, EPTimeoutError) and error.peer == 0 and "combine" in error.phase, error
    assert query(group, buffer) == (set() if group.rank == 0 else {0}), "it does not mask itself"
    group.barrier()
    buffer.destroy()
