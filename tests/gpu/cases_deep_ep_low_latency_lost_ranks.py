"""What every rank does in test_deep_ep.py: DeepEP's face, low latency; a rank is late, is killed, or returns."""

import os
import random
import signal as signals
import time

import torch
from torch import Tensor

from eprt.compat.deep_ep import Buffer
from eprt.ep.errors import EPTimeoutError
from eprt.ep.group.group import EPGroup
from eprt.ep.reference import SentTokens
from tests.gpu.cases_deep_ep_low_latency import Step, make_buffer, make_config, tokens_of
from tests.gpu.shared import needs_own_gpu


@needs_own_gpu
def late_rank(group: EPGroup) -> None:
    """The last rank is late by some milliseconds: everyone's statistics show it, and only it."""
    buffer = make_buffer(group)
    config = make_config(group, (2048, 8, 4, 32), False, False)
    rng, last = random.Random(4), group.size - 1
    waits = [torch.zeros(group.size, dtype=torch.int64, device="cuda") for _ in range(2)]
    Step(group, buffer, config, tokens_of(rng, group, config, "uniform"), "plain").dispatch()  # allocates
    for phase in range(2):
        for calls in ("plain", "hook"):
            step = Step(group, buffer, config, tokens_of(rng, group, config, "uniform"), calls)
            for one in waits:
                one.zero_()
            torch.cuda.synchronize()
            group.barrier()
            if group.rank == last and phase == 0:
                torch.cuda._sleep(20_000_000)  # about 10 ms
            step.dispatch(dispatch_wait_recv_cost_stats=waits[0])()
            step.check_received()
            y = step.outputs()
            torch.cuda.synchronize()
            group.barrier()
            if group.rank == last and phase == 1:
                torch.cuda._sleep(20_000_000)
            wait = step.combine(y, combine_wait_recv_cost_stats=waits[1])
            if calls == "hook":
                torch.cuda.synchronize()
                assert not any(waits[1].tolist()), "the sending half waits for nobody"
            wait()
            torch.cuda.synchronize()
            step.check_combined()
            waited = waits[phase].tolist()
            late, others = waited[last], waited[:last]
            if group.rank != last and (phase == 0 or step.mine.x_TH.shape[0]):
                assert late > 3_000_000 > max(others, default=0), (phase, calls, waited)
            assert group.rank != last or max(waited) < 3_000_000, (phase, calls, waited)
    buffer.destroy()


def near_without(step: Step, masked: set[int]) -> None:
    """Combined outputs of an identity, without those of masked ranks."""
    x, weights = step.mine.x_TH.float(), step.mine.topk_weights_TK
    holder = step.idx // step.local
    gone = (step.idx < 0) | torch.tensor([r in masked for r in range(step.group.size)], device="cuda")[holder]
    want = x * (weights * ~gone).sum(1, keepdim=True)
    error = (step.out.float() - want).norm() / want.norm().clamp_min(1e-20)
    assert float(error) < 8e-3, f"without {masked}: relative error {float(error)}"


def dispatched(group: EPGroup, buffer: Buffer, calls: str, generator: torch.Generator) -> Step:
    config = make_config(group, (2048, 8, 4, 32), False, False)
    x = torch.randn(32, 2048, device="cuda", generator=generator).bfloat16()
    idx = torch.rand(32, config.num_slots, device="cuda", generator=generator).topk(4).indices
    weights = torch.rand(32, 4, dtype=torch.float32, device="cuda", generator=generator)
    step = Step(group, buffer, config, [SentTokens(x, idx, weights)] * group.size, calls)
    step.dispatch()()
    return step


def identity(group: EPGroup, buffer: Buffer, calls: str, generator: torch.Generator) -> Step:
    step = dispatched(group, buffer, calls, generator)
    assert isinstance(step.received, Tensor)
    step.combine(step.received)()
    return step


def query(group: EPGroup, buffer: Buffer) -> set[int]:
    status = torch.full((group.size,), 7, dtype=torch.int32, device="cuda")
    buffer.low_latency_query_mask_buffer(status)
    return set(status.nonzero().flatten().tolist())


def killed_rank(group: EPGroup, victim: int, before: str) -> None:
    """With enable_shrink the others go on without a killed rank, and take nobody else for dead, who only waits for it,
    too. Entries for it may be masked before combine only. before: the call that it does not make any more."""
    buffer = make_buffer(group, timeout_s=1.0, enable_shrink=True)
    generator = torch.Generator("cuda").manual_seed(group.rank)
    for calls in ("plain", "async", "hook"):
        near_without(identity(group, buffer, calls, generator), set())
    assert query(group, buffer) == set()
    step = dispatched(group, buffer, "plain", generator) if before == "combine" else None
    torch.cuda.synchronize()
    group.barrier()
    if group.rank == victim:
        os.kill(os.getpid(), signals.SIGKILL)
    while victim not in group.lost_ranks():
        time.sleep(0.01)
    started = time.monotonic()
    step = step or dispatched(group, buffer, "plain", generator)  # one of the two runs into the deadline
    assert isinstance(step.received, Tensor)
    step.combine(step.received)()
    near_without(step, {victim})
    torch.cuda.synchronize()
    print(f"went on after {time.monotonic() - started:.1f} s")
    assert query(group, buffer) == {victim}
    started = time.monotonic()
    for number in range(30):
        step = identity(group, buffer, ("plain", "async", "hook")[number % 3], generator)
        near_without(step, {victim})
        step.idx = step.idx.masked_fill(step.idx // step.local == victim, -1)
        assert isinstance(step.received, Tensor)
        step.combine(step.received)()
        near_without(step, {victim})
    assert time.monotonic() - started < 5, "masked ranks must not be waited for"
    buffer.destroy()


def rank_returns(group: EPGroup) -> None:
    """Later than the deadline: without enable_shrink an error names the rank; cleaning the mask takes it back."""
    buffer = make_buffer(group, timeout_s=1.0)
    generator, last = torch.Generator("cuda").manual_seed(group.rank), group.size - 1
    others = set(range(group.size)) - {group.rank}
    near_without(identity(group, buffer, "plain", generator), set())
    torch.cuda.synchronize()
    group.barrier()
    if group.rank == last:
        time.sleep(3.0)  # the others have given up by then; nobody sends it outputs
        identity(group, buffer, "plain", generator)
    else:
        near_without(identity(group, buffer, "plain", generator), {last})
    torch.cuda.synchronize()
    assert query(group, buffer) == (others if group.rank == last else {last})
    try:
        buffer.clean_low_latency_buffer(32, 2048, 8 * group.size)
        raise AssertionError("nobody was missed")
    except EPTimeoutError as error:
        assert error.rank == group.rank and error.peer in others, error
    group.barrier()
    buffer.low_latency_clean_mask_buffer()
    assert query(group, buffer) == set()
    torch.cuda.synchronize()
    group.barrier()
    for calls in ("plain", "async", "hook") * 3:
        near_without(identity(group, buffer, calls, generator), set())
    torch.cuda.synchronize()
    group.barrier()
    for rank in others if group.rank == last else {last}:  # all agree, and all make the same calls
        buffer.low_latency_update_mask_buffer(rank, True)
    near_without(identity(group, buffer, "hook", generator), others if group.rank == last else {last})
    buffer.destroy()
