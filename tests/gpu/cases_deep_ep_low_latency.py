"""What every rank does in test_deep_ep.py: low latency of DeepEP's face against an oracle.

SentTokens of all ranks are made on all ranks from one seed, so each rank knows what it must receive.
"""

import dataclasses
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eprt.compat.deep_ep import Buffer
from eprt.ep.config import EPConfig
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
