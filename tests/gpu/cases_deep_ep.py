"""What every rank does in test_deep_ep.py: the DeepEP face, low latency, against an oracle. Normal mode:
cases_deep_ep_normal.py.

SentTokens of all ranks are made on all ranks from one seed, so each rank knows what it must receive.
"""

import dataclasses
import os
import random
import signal as signals
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eprt.compat.deep_ep import Buffer
from eprt.ep.config import EPConfig
from eprt.ep.errors import EPError, EPTimeoutError
from eprt.ep.group.group import EPGroup
from eprt.ep.reference import SentTokens
from tests.gpu import fast_oracle
from tests.gpu.cases_normal import poison_new_tensors, random_tokens
from tests.ranks.cases_ep import assert_same_bits

SKEWS = ("uniform", "masked", "one_rank", "empty_ranks", "no_tokens")
# (hidden, experts per rank, top_k, M)
SHAPES = [(7168, 32, 8, 128), (2048, 4, 4, 40), (1152, 3, 1, 33), (5120, 20, 6, 64)]


def make_config(group: EPGroup, shape: Sequence[int], fp8: bool, exact: bool) -> EPConfig:
    hidden, per_rank, top_k, tokens = shape
    return EPConfig(
        hidden,
        per_rank * group.size,
        top_k,
        tokens,
        torch.bfloat16,
        "fp8" if fp8 else "same",
        "low_latency",
        device="cuda",
        exact_combine=exact,
    )


def make_buffer(group: EPGroup, timeout_s: float = 20.0, **options: Any) -> Buffer:
    os.environ["EPRT_GPU_TIMEOUT_S"] = str(timeout_s)
    return Buffer(group, low_latency_mode=True, explicitly_destroy=True, **options)


class Step:
    """One dispatch and what comes after it, of this rank. calls: "plain", "async" or "hook"."""

    def __init__(self, group: EPGroup, buffer: Buffer, config: EPConfig, everyone: Sequence[SentTokens], calls: str):
        self.group, self.buffer, self.config, self.everyone, self.calls = group, buffer, config, everyone, calls
        self.mine = everyone[group.rank]
        self.idx = self.mine.slot_idx_TK
        self.per_expert = group.size * config.num_max_tokens_per_rank
        self.local = config.num_slots // group.size
        self.recv_total = torch.full((self.local,), 3, dtype=torch.int32, device="cuda")

    def dispatch(self, **options: Any) -> Callable[[], None]:
        """Returns what waits for it."""
        self.told = "topk_weights" in options
        self.received, self.count, self.handle, event, hook = self.buffer.low_latency_dispatch(
            self.mine.x_TH,
            self.idx,
            self.config.num_max_tokens_per_rank,
            self.config.num_slots,
            self.recv_total,
            use_fp8=self.config.payload == "fp8",
            async_finish=self.calls == "async",
            return_recv_hook=self.calls == "hook",
            **options,
        )
        return self._waiter(event, hook)

    def combine(self, y: Tensor, **options: Any) -> Callable[[], None]:
        self.out, event, hook = self.buffer.low_latency_combine(
            y,
            self.idx,
            self.mine.topk_weights_TK,
            self.handle,
            async_finish=self.calls == "async",
            return_recv_hook=self.calls == "hook",
            **options,
        )
        return self._waiter(event, hook)

    def _waiter(self, event: Any, hook: Callable[[], None] | None) -> Callable[[], None]:
        if hook is not None:
            return hook
        return event.current_stream_wait if self.calls == "async" else lambda: None

    def check_received(self) -> None:
        """Rows, scales, counts, and DeepEP's handle."""
        want = fast_oracle.received(self.group.rank, self.config, self.everyone)
        x, scale = self.received if isinstance(self.received, tuple) else (self.received, None)
        assert_same_bits(self.count, want.count, "count")
        assert torch.equal(self.recv_total, want.count + 3)
        first = want.count.cumsum(0) - want.count
        self.row = want.slot * self.per_expert + want.row - first[want.slot]  # in [L * R * M] rows
        got = x.view(-1, x.shape[-1]).view(torch.uint8)[self.row]
        assert_same_bits(got, want.x.view(torch.uint8)[want.row], "rows")
        if scale is not None:
            assert want.scale is not None and scale.transpose(1, 2).is_contiguous()
            assert_same_bits(scale.reshape(-1, scale.shape[-1])[self.row], want.scale[want.row], "scales")
        assert torch.equal(self.handle[0].view(-1)[self.row].long(), want.token)
        ranges = self.handle[1]
        sent = torch.zeros_like(ranges).index_put_(
            (want.slot, want.source), torch.ones_like(want.slot), accumulate=True
        )
        assert torch.equal(ranges & 0xFFFFFFFF, sent)
        assert torch.equal((ranges >> 32)[sent > 0], (sent.cumsum(1) - sent)[sent > 0])

    def outputs(self) -> Tensor:
        """The experts' outputs, NaN where there is no row."""
        want = fast_oracle.received(self.group.rank, self.config, self.everyone)
        shape = self.local, self.per_expert, self.config.hidden_size
        y = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
        y.view(-1, shape[-1])[self.row] = fast_oracle.outputs(self.group.rank, self.config, want)[want.row]
        return y

    def check_combined(self) -> None:
        exact = self.config.exact_combine or (self.calls == "hook" and not self.told)
        config = dataclasses.replace(self.config, exact_combine=exact)
        want = fast_oracle.combined(self.group.rank, config, self.everyone)
        assert_same_bits(self.out, want, f"combined, {self.calls}")


def tokens_of(rng: random.Random, group: EPGroup, config: EPConfig, skew: str) -> list[SentTokens]:
    """No token names a slot twice: a slot has room for each token once."""
    if skew != "one_rank":
        return random_tokens(rng, config, group.size, skew)
    local, target = config.num_slots // group.size, rng.randrange(group.size)
    generator = torch.Generator("cuda").manual_seed(rng.randrange(1 << 30))
    everyone = []
    for tokens in random_tokens(rng, config, group.size, "uniform"):
        order = torch.rand(tokens.x_TH.shape[0], local, device="cuda", generator=generator).argsort(1)
        slots = (target * local + order[:, : config.top_k]).to(tokens.slot_idx_TK.dtype).contiguous()
        everyone.append(dataclasses.replace(tokens, slot_idx_TK=slots))
    return everyone


def shapes(group: EPGroup, seed: int, cases_per_shape: int) -> None:
    """All ways to call, combined twice from one dispatch, the second time from the buffer to fill."""
    rng = random.Random(seed)
    poison_new_tensors()
    for exact in (False, True):
        buffer = make_buffer(group, exact_combine=exact)
        for number, shape in enumerate(SHAPES):
            for case in range(cases_per_shape):
                fp8, calls = rng.random() < 0.6, ("plain", "async", "hook")[case % 3]
                config = make_config(group, shape, fp8, exact)
                skew = SKEWS[(case + number) % len(SKEWS)]
                step = Step(group, buffer, config, tokens_of(rng, group, config, skew), calls)
                told = {"topk_weights": step.mine.topk_weights_TK} if rng.random() < 0.4 else {}
                try:
                    step.dispatch(**told)()
                    step.check_received()
                    y = step.outputs()
                    step.combine(y)()
                    step.check_combined()
                    buffer.get_next_low_latency_combine_buffer(step.handle).copy_(y)
                    out = torch.full_like(step.out, float("nan"))
                    step.combine(torch.full_like(y, float("nan")), zero_copy=True, out=out)()
                    assert step.out is out
                    step.check_combined()
                except BaseException:
                    print(shape, exact, fp8, calls, skew, bool(told), flush=True)
                    raise
        buffer.clean_low_latency_buffer(SHAPES[0][3], SHAPES[0][0], SHAPES[0][1] * group.size)
        torch.cuda.synchronize()
        buffer.destroy()


def scale_formats(group: EPGroup) -> None:
    """Powers of two, and the same as packed exponents: the smallest that keep all values in range."""
    buffer, rng = make_buffer(group), random.Random(3)
    config = make_config(group, (1024, 4, 4, 32), True, False)
    everyone = tokens_of(rng, group, config, "uniform")
    for packed in (False, True):
        step = Step(group, buffer, config, everyone, "plain")
        step.dispatch(round_scale=True, use_ue8m0=packed)
        want = fast_oracle.received(group.rank, config, everyone)
        first = want.count.cumsum(0) - want.count
        row = want.slot * step.per_expert + want.row - first[want.slot]
        x, scale = step.received
        assert isinstance(scale, Tensor) and want.scale is not None
        if packed:
            assert scale.dtype == torch.int32 and scale.shape[-1] == 2
            exponent = scale.reshape(-1, 2)[row].contiguous().view(torch.uint8).int()
            scale_NG = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - 127)
        else:
            scale_NG = scale.reshape(-1, 8)[row]
        assert torch.equal(scale_NG, torch.exp2(torch.log2(want.scale[want.row]).ceil())), "scales"
        sent = torch.cat([t.x_TH for t in everyone]).float()
        base = torch.tensor([0, *(t.x_TH.shape[0] for t in everyone)], device="cuda").cumsum(0)
        value = sent[base[want.source] + want.token]
        values = (value / scale_NG.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
        assert_same_bits(x.view(-1, 1024).view(torch.uint8)[row], values.view(torch.uint8), "values")
    torch.cuda.synchronize()
    buffer.destroy()


def in_flight(group: EPGroup) -> None:
    """Two dispatches, then two combines, whose hooks are outstanding; a third is refused; one dispatch is dropped."""
    buffer, rng = make_buffer(group), random.Random(5)
    config = make_config(group, (2048, 8, 4, 32), False, False)
    for turn in range(4):
        steps = [Step(group, buffer, config, tokens_of(rng, group, config, "uniform"), "hook") for _ in range(3)]
        hooks = [step.dispatch() for step in steps[:2]]
        refused(group, steps[2].dispatch, "the hook of low_latency_dispatch")
        for step, hook in zip(steps, hooks):
            hook()
            step.check_received()
        refused(group, hooks[0], "called already")
        steps[2].dispatch()()  # never combined
        ys = [step.outputs() for step in steps[:2]]
        hooks = [step.combine(y) for step, y in zip(steps, ys)]
        refused(group, lambda s=steps[0], y=ys[0]: s.combine(y), "hook")
        for hook in reversed(hooks) if turn % 2 else hooks:
            hook()
        torch.cuda.synchronize()
        for step in steps[:2]:
            step.check_combined()
    buffer.destroy()


def graph_replay(group: EPGroup) -> None:
    """Two layers with hooks in one graph, replayed with new tokens, between eager calls."""
    buffer, T, hidden, top_k, experts = make_buffer(group), 32, 2048, 4, 8 * group.size
    x = torch.zeros(T, hidden, dtype=torch.bfloat16, device="cuda")
    idx = torch.arange(top_k, device="cuda").repeat(T, 1)
    weights = torch.zeros(T, top_k, dtype=torch.float32, device="cuda")

    def layer() -> Tensor:
        received, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, T, experts, use_fp8=False, return_recv_hook=True
        )
        assert hook is not None and isinstance(received, Tensor)
        hook()
        out, _, hook = buffer.low_latency_combine(received, idx, weights, handle, return_recv_hook=True)
        assert hook is not None
        hook()
        return out

    def want() -> Tensor:
        return x.float() * (weights * (idx >= 0)).sum(1, keepdim=True)

    def near(got: Tensor, what: str) -> None:
        assert float((got.float() - want()).norm() / want().norm()) < 8e-3, what

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer() for _ in range(3)]
    generator = torch.Generator("cuda").manual_seed(100 + group.rank)
    for step in range(40):
        x.copy_(torch.randn(x.shape, device="cuda", generator=generator))
        idx.copy_(torch.rand(T, experts, device="cuda", generator=generator).topk(top_k).indices)
        idx[torch.rand(idx.shape, device="cuda", generator=generator) < 0.1] = -1
        weights.copy_(torch.rand(weights.shape, device="cuda", generator=generator))
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            near(out, f"replay {step}")
        if step % 5 == 0:
            near(layer(), "eager")
    buffer.destroy()


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


def refused(group: EPGroup, call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(f"nothing was raised; expected {words}")


def bad_input(group: EPGroup) -> None:
    buffer, here = make_buffer(group), f"[rank {group.rank}/{group.size}]"
    config = make_config(group, (2048, 8, 4, 32), False, False)
    step = Step(group, buffer, config, tokens_of(random.Random(1), group, config, "masked"), "plain")
    x, idx, experts = step.mine.x_TH, step.idx, config.num_slots
    send = buffer.low_latency_dispatch
    many = torch.zeros(33, 2048, dtype=torch.bfloat16, device="cuda")
    many_idx = torch.zeros(33, 4, dtype=torch.int64, device="cuda")
    refused(group, lambda: send(many, many_idx, 32, experts), here, "33 tokens", "=32")
    refused(group, lambda: send(x.float(), idx, 32, experts), here, "x is torch.float32")
    refused(group, lambda: send(x.cpu(), idx, 32, experts), here, "x is on cpu")
    refused(group, lambda: send(x, idx.float(), 32, experts), here, "topk_idx is torch.float32")
    refused(group, lambda: send(x, idx, 32, experts + 1), here, f"num_experts={experts + 1}")
    refused(group, lambda: send(x, idx, 32, experts, use_ue8m0=True), here, "round_scale")
    refused(group, lambda: send(x, idx, 32, experts, async_finish=True, return_recv_hook=True), here, "exclude")
    refused(group, lambda: send(x[:, :1000].contiguous(), idx, 32, experts), here, "hidden=1000")
    refused(group, lambda: buffer.low_latency_update_mask_buffer(group.size, True), here, f"no rank {group.size}")
    step.dispatch()
    step.check_received()
    y, weights, handle = step.outputs(), step.mine.topk_weights_TK, step.handle
    back = buffer.low_latency_combine
    try:
        back(y, idx, weights, handle, use_logfmt=True)
        raise AssertionError("nothing was raised")
    except NotImplementedError as error:
        assert "use_logfmt" in str(error)
    refused(group, lambda: back(y, idx, weights, tuple(handle)), here, "handle")
    refused(group, lambda: back(y[:, :1], idx, weights, handle), here, "x is torch.bfloat16")
    more = torch.ones(len(weights) + 1, 4, dtype=torch.float32, device="cuda")
    more_idx = torch.zeros(len(weights) + 1, 4, dtype=torch.int64, device="cuda")
    refused(group, lambda: back(y, more_idx, more, handle), here, f"{len(more)} tokens", "dispatch of")
    refused(group, lambda: back(y, idx, weights, handle, overlap=True), here, "return_recv_hook")
    refused(group, lambda: back(y, idx, weights, handle, overlap=True, return_recv_hook=True), here, "comp_signal")
    step.combine(y)
    step.check_combined()
    for _ in range(8):
        step.recv_total.fill_(3)
        step.dispatch()
    refused(group, lambda: back(y, idx, weights, handle), here, "last 8")
    group.barrier()
    bad = torch.tensor([[0, 1, experts, 2]], device="cuda")
    one = torch.ones(1, 2048, dtype=torch.bfloat16, device="cuda")
    send(one, bad, 32, experts)
    torch.cuda.synchronize()
    refused(group, lambda: send(one, bad, 32, experts), here, f"topk_idx[0, 2] = {experts} ", "-1 to mask")
    group.barrier()
    buffer.destroy()
    try:
        send(x, idx, 32, experts)
        raise AssertionError("nothing was raised")
    except RuntimeError as error:
        assert "destroyed" in str(error)


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


def one_launch(group: EPGroup, seed: int, cases_per_shape: int) -> None:
    """What needs no process to die, in one start of the processes."""
    for case in (in_flight, graph_replay, scale_formats, late_rank, bad_input, tiles, rank_returns):
        started = time.monotonic()
        case(group)
        if group.rank == 0:
            print(f"{case.__name__}: {time.monotonic() - started:.1f} s", flush=True)
    shapes(group, seed, cases_per_shape)
