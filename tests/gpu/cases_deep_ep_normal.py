"""What every rank does in test_deep_ep.py: the DeepEP face, normal mode, with bfloat16 as torch's default dtype."""

import os
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eprt.compat.deep_ep import Buffer, Config
from eprt.ep.errors import EPError
from eprt.ep.group.group import EPGroup
from eprt.ep.reference import SentTokens
from tests.gpu import fast_oracle
from tests.gpu.cases_normal import make_config, poison_new_tensors, random_tokens
from tests.gpu.cases_normal_rows import Expected, expected_rows
from tests.ranks.cases_ep import assert_same_bits

# (hidden, experts, top_k, most tokens, payload, exact): 640 has 5 scales a row, which lie padded in memory
SHAPES = [
    (7168, 256, 8, 700, "fp8", False),
    (640, 16, 3, 1000, "fp8", False),
    (2048, 64, 6, 333, "same", False),
]
SKEWS = ("uniform", "masked", "one_rank", "empty_ranks", "no_tokens")


def make_buffer(group: EPGroup, num_bytes: int, timeout_s: float = 20.0) -> Buffer:
    os.environ["EPRT_GPU_TIMEOUT_S"] = str(timeout_s)
    return Buffer(group, num_bytes, explicitly_destroy=True)


def rows_of(want: Expected, tokens: list[Tensor]) -> Tensor:
    """Of every source's tensor [T, ..], the rows this rank receives."""
    rows = torch.zeros(len(want.source), *tokens[0].shape[1:], dtype=tokens[0].dtype, device="cuda")
    for source, values in enumerate(tokens):
        here = want.source == source
        rows.view(torch.uint8)[here] = values.view(torch.uint8)[want.token[here]]
    return rows


class Case:
    """One routing of all ranks and its calls on this one, each either on the current stream or asynchronous."""

    def __init__(self, group: EPGroup, buffer: Buffer, rng: random.Random, shape: tuple, skew: str):
        self.group, self.buffer, self.rng = group, buffer, rng
        self.config = make_config(group, shape)
        self.everyone: list[SentTokens] = random_tokens(rng, self.config, group.size, skew)
        self.mine = self.everyone[group.rank]
        self.slots = self.mine.slot_idx_TK.long()
        self.alignment = rng.choice([1, 1, 128])
        self.want = expected_rows(group.rank, self.config.num_slots, self.everyone, self.alignment)
        self.payloads = [fast_oracle.payload(self.config, t.x_TH) for t in self.everyone]
        self.is_async = rng.random() < 0.5
        self.options: dict[str, Any] = {"config": Config(rng.choice([2, 24])), "async_finish": self.is_async}

    def call(self, function: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
        """The results, once the current stream may use them."""
        if self.rng.random() < 0.5:
            kwargs["previous_event"] = self.buffer.capture()
            kwargs["allocate_on_comm_stream"] = self.is_async
        *results, event = function(*args, **self.options, **kwargs)
        if self.is_async:
            event.current_stream_wait()
        return tuple(results)

    def check_layout(self) -> None:
        local, R, S = self.config.num_slots // self.group.size, self.group.size, self.config.num_slots
        per_rank, none, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(self.mine.slot_idx_TK, S)
        holder = torch.where(self.slots >= 0, self.slots // local, R)
        want = torch.stack([(holder == r).any(1) for r in range(R)], 1)
        assert none is None and torch.equal(in_rank, want)
        assert torch.equal(per_rank, want.sum(0, dtype=torch.int32))
        chosen = self.slots[self.slots >= 0]
        assert torch.equal(per_expert, torch.bincount(chosen, minlength=S).int())
        self.layout = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
        }

    def x(self) -> Any:
        values, scale = self.payloads[self.group.rank]
        if scale is None:
            return values
        return values, scale.t().contiguous().t() if self.rng.random() < 0.5 else scale

    def check_x(self, received: Any, payloads: list[tuple[Tensor, Tensor | None]], what: str) -> None:
        values, scale = received if isinstance(received, tuple) else (received, None)
        rows = len(self.want.source)
        want = rows_of(self.want, [x for x, _ in payloads]).view(torch.uint8)
        assert_same_bits(values[:rows].view(torch.uint8), want, what)
        if payloads[0][1] is not None:
            assert scale is not None and scale.is_contiguous()
            assert_same_bits(scale[:rows], rows_of(self.want, [s for _, s in payloads if s is not None]), what)

    def dispatch(self) -> Any:
        """With experts, as many rows as come."""
        received, idx, weights, rows_of_expert, self.handle = self.call(
            self.buffer.dispatch,
            self.x(),
            topk_idx=self.mine.slot_idx_TK,
            topk_weights=self.mine.topk_weights_TK,
            expert_alignment=self.alignment,
            **self.layout,
        )
        self.check_x(received, self.payloads, "dispatch")
        assert torch.equal(idx, self.want.idx) and torch.equal(weights, self.want.weights)
        assert weights.dtype == torch.float32 and rows_of_expert == self.want.rows_of_expert
        prefix, _, _, token, in_rank, _ = self.handle
        assert torch.equal(prefix, self.want.sent.cumsum(0).int()) and torch.equal(token.long(), self.want.token)
        assert torch.equal(in_rank, self.layout["is_token_in_rank"])
        self.weights = weights
        return received

    def check_static(self) -> None:
        rows, bound = len(self.want.source), sum(t.x_TH.shape[0] for t in self.everyone) + 3
        received, idx, weights, rows_of_expert, _ = self.call(
            self.buffer.dispatch,
            self.x(),
            topk_idx=self.mine.slot_idx_TK,
            topk_weights=self.mine.topk_weights_TK,
            num_worst_tokens=bound,
            **self.layout,
        )
        self.check_x(received, self.payloads, "num_worst_tokens")
        assert rows_of_expert == [] and len(idx) == len(weights) == bound
        assert torch.equal(idx[:rows], self.want.idx) and (idx[rows:] == -1).all()
        assert torch.equal(weights[:rows], self.want.weights)

    def check_without_experts(self) -> None:
        received, idx, weights, rows_of_expert, _ = self.call(
            self.buffer.dispatch, self.x(), expert_alignment=self.alignment, **self.layout
        )
        self.check_x(received, self.payloads, "without experts")
        assert idx is None and weights is None and rows_of_expert == self.want.rows_of_expert

    def check_again(self) -> None:
        """Other values of the same layout."""
        flipped = [(-x.float()).to(x.dtype) for x, _ in self.payloads]
        payloads = [(x, scale) for x, (_, scale) in zip(flipped, self.payloads)]
        x, scale = payloads[self.group.rank]
        received, *nothing = self.call(self.buffer.dispatch, x if scale is None else (x, scale), handle=self.handle)
        self.check_x(received, payloads, "again")
        assert nothing == [None] * 4

    def check_combine(self) -> None:
        """Rows times (rank + 1), plus biases: the fp32 sum in order of rank, rounded once; and the weights' sums."""
        T, hidden = self.mine.x_TH.shape[0], self.config.hidden_size
        source = rows_of(self.want, [t.x_TH for t in self.everyone])
        y = (source.float() * (self.group.rank + 1)).bfloat16()
        biases = [torch.randn(T, hidden, device="cuda").bfloat16() for _ in range(self.rng.randint(0, 2))]
        bias = (None, biases[0], tuple(biases))[len(biases)] if biases else None
        with_weights = self.rng.random() < 0.7
        out, out_weights = self.call(
            self.buffer.combine, y, self.handle, topk_weights=self.weights if with_weights else None, bias=bias
        )
        total = torch.zeros(T, hidden, dtype=torch.float32, device="cuda")
        for one in biases:
            total = total + one.float()
        for r in range(self.group.size):
            there = self.layout["is_token_in_rank"][:, r, None]
            total = torch.where(there, total + (self.mine.x_TH.float() * (r + 1)).bfloat16().float(), total)
        assert_same_bits(out + 0.0, total.bfloat16() + 0.0, "combine")
        assert (out_weights is None) != with_weights
        if with_weights:
            assert out_weights.dtype == torch.float32
            assert torch.equal(out_weights, torch.where(self.slots >= 0, self.mine.topk_weights_TK, 0))


def shapes(group: EPGroup, seed: int, cases_per_shape: int) -> None:
    poison_new_tensors()
    buffer, rng = make_buffer(group, 1 << 30), random.Random(seed)
    for number, shape in enumerate(SHAPES):
        for turn in range(cases_per_shape):
            skew = SKEWS[(turn + number) % len(SKEWS)]
            case = Case(group, buffer, rng, shape, skew)
            try:
                torch.set_default_dtype(torch.bfloat16)  # as DeepEP's own tests do
                case.check_layout()
                case.dispatch()
                case.check_static()
                case.check_without_experts()
                case.check_again()
                case.check_combine()
            except BaseException:
                print(shape, skew, case.options, flush=True)
                raise
            finally:
                torch.set_default_dtype(torch.float32)
    buffer.destroy()


def memory(group: EPGroup) -> None:
    """Results outlive later calls, however many: when memory runs low they are copies. Too large a call is named, on
    the ranks that sent it, too, and the next one works."""
    buffer, rng = make_buffer(group, 0, timeout_s=5.0), random.Random(7)  # the smallest: 256 MiB
    kept = []
    for _ in range(8):
        case = Case(group, buffer, rng, (7168, 64, 4, 2000, "same", False), "uniform")
        case.check_layout()
        kept.append((case, case.dispatch()))
        case.check_combine()
    for case, received in kept:
        case.check_x(received, case.payloads, "later")
    T, S = 20_000, 64
    x = torch.zeros(T, 7168, dtype=torch.bfloat16, device="cuda")
    idx = torch.zeros(T, 1, dtype=torch.int64, device="cuda")  # all to rank 0
    weights = torch.ones(T, 1, dtype=torch.float32, device="cuda")
    kept.clear()
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, S)
    try:
        buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, weights)
        assert group.rank != 0, "rank 0 has no room"
    except ValueError as error:
        assert group.rank == 0 and "num_nvl_bytes" in str(error), error
    torch.cuda.synchronize()
    group.barrier()
    case = Case(group, buffer, random.Random(8), (2048, 64, 4, 100, "same", False), "uniform")
    case.check_layout()
    try:
        case.dispatch()
        raise AssertionError("nobody heard of the rows that had no room")
    except EPError as error:
        assert "rank 0 " in str(error) and "room for 0" in str(error), error
    group.barrier()
    case.dispatch()
    case.check_combine()
    buffer.destroy()


def streams(group: EPGroup) -> None:
    """Rows that a stream still reads are not overwritten, although Python has let go of them."""
    buffer, T, hidden, S = make_buffer(group, 0), 2000, 2048, 8 * group.size
    idx = (torch.arange(T * 2, device="cuda") % S).view(T, 2)
    weights = torch.ones(T, 2, dtype=torch.float32, device="cuda")
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, S)
    x = torch.zeros(T, hidden, dtype=torch.bfloat16, device="cuda")
    *_, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, weights)
    for turn in range(4):
        x = torch.full((T, hidden), turn, dtype=torch.bfloat16, device="cuda")
        later = torch.full((T, hidden), 100 + turn, dtype=torch.bfloat16, device="cuda")
        start = buffer.capture()
        received, *_, event = buffer.dispatch(x, handle=handle, previous_event=start, async_finish=True)
        assert isinstance(received, Tensor)
        event.current_stream_wait()
        before = received.data_ptr()
        torch.cuda._sleep(20_000_000)  # the reader comes late
        copy = received.clone()
        del received
        again, *_, event = buffer.dispatch(later, handle=handle, previous_event=start, async_finish=True)
        event.current_stream_wait()
        assert isinstance(again, Tensor) and again.data_ptr() == before, "the case needs the same memory"
        assert bool((copy == turn).all()) and bool((again == 100 + turn).all())
        del again
    buffer.destroy()


def graph_replay(group: EPGroup) -> None:
    """With a static bound a step, layout included, can be captured, and replayed with other tokens."""
    buffer, T, hidden, S = make_buffer(group, 0), 200, 2048, 8 * group.size
    x = torch.zeros(T, hidden, dtype=torch.bfloat16, device="cuda")
    idx = torch.zeros(T, 4, dtype=torch.int64, device="cuda")
    weights = torch.zeros(T, 4, dtype=torch.float32, device="cuda")

    def step() -> tuple[Any, Any]:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, S)
        received, _, recv_weights, _, handle, _ = buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, idx, weights, num_worst_tokens=group.size * T
        )
        assert isinstance(received, Tensor) and handle is not None
        y, y_weights, _ = buffer.combine(received, handle, topk_weights=recv_weights)
        return y, y_weights

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, y_weights = step()
    generator = torch.Generator("cuda").manual_seed(300 + group.rank)
    for turn in range(10):
        x.copy_(torch.randn(x.shape, device="cuda", generator=generator))
        idx.copy_(torch.randint(-1, S, idx.shape, device="cuda", generator=generator))
        weights.copy_(torch.rand(weights.shape, device="cuda", generator=generator))
        y.fill_(float("nan"))
        graph.replay()
        ranks = torch.where(idx >= 0, idx // 8, group.size)
        num_ranks = torch.stack([(ranks == r).any(1) for r in range(group.size)]).sum(0)
        assert_same_bits(y + 0.0, (x.float() * num_ranks[:, None]).bfloat16() + 0.0, f"replay {turn}")
        assert torch.equal(y_weights, torch.where(idx >= 0, weights, 0))
    buffer.destroy()


def one_launch(group: EPGroup, seed: int, cases_per_shape: int) -> None:
    memory(group)
    streams(group)
    graph_replay(group)
    shapes(group, seed, cases_per_shape)
