"""What every rank does in test_low_latency.py: low latency against the CPU oracle, many cases per launch.

SentTokens of all ranks are made on all ranks from one seed, so each rank knows what it must receive.
"""

import dataclasses
import functools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from eprt.ep import reference
from eprt.ep.api import Received
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.low_latency import POWER_OF_TWO
from eprt.ep.nvlink.low_latency_backend import NvlinkLowLatencyBackend
from eprt.ep.nvlink.options import NvlinkOptions
from eprt.ep.nvlink.structs import RECV, SEND
from eprt.ep.reference import SentTokens
from eprt.ep.registry import make_backend
from tests.gpu.identity import assert_near, expected_identity, identity_step, run_epochs
from tests.ranks.cases_ep import SKEWS, assert_same_bits, expert_output, make_tokens

# (hidden, slots per rank, top_k, tokens per rank, payload, exact)
SHAPES = [
    (7168, 16, 8, 24, "fp8", False),
    (7168, 16, 8, 24, "fp8", True),
    (2048, 4, 4, 33, "fp8", False),
    (2048, 4, 4, 33, "same", True),
    (4096, 8, 1, 64, "same", False),
    (5120, 20, 6, 17, "fp8", False),
    (8192, 48, 10, 12, "same", False),
    (1008, 3, 2, 40, "fp8", True),
    (1008, 3, 2, 40, "same", False),
]


def make_config(group: EPGroup, shape: Sequence, **fields) -> EPConfig:
    hidden, slots_per_rank, top_k, tokens, payload, exact = shape
    options = {"timeout_s": 20.0, **fields}
    return EPConfig(
        hidden,
        slots_per_rank * group.size,
        top_k,
        tokens,
        torch.bfloat16,
        payload,
        "low_latency",
        device="cuda",
        exact_combine=exact,
        **options,
    )


def make(group: EPGroup, config: EPConfig, **options) -> NvlinkLowLatencyBackend:
    """options: of NvlinkOptions."""
    name = "nvlink" if group.num_nodes == 1 else "nvshmem"
    backend = make_backend(name, config, group, NvlinkOptions(**options))
    assert isinstance(backend, NvlinkLowLatencyBackend)
    return backend


def poison(backend: NvlinkLowLatencyBackend) -> None:
    """What a kernel leaves out must not look right: NaN in every receive buffer, and in torch's new tensors."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for rows in backend._rows:
        rows.x.view(torch.uint8).fill_(0xFF)
        rows.count.fill_(-7)
        if rows.scale is not None:
            rows.scale.fill_(float("nan"))


def filled(received: Received) -> Received:
    """On the CPU, without the rows that hold nothing."""
    count = received.recv_count_E.cpu()
    rows = int(count.sum())
    scale = None if received.scale_RG is None else received.scale_RG[:rows].cpu()
    return Received(received.x_RH[:rows].cpu(), count, scale)


def padded(y_RH: Tensor, backend: NvlinkLowLatencyBackend) -> Tensor:
    """As the kernels take it: max_rows rows, NaN where there is no row."""
    y = torch.full((backend.max_rows, y_RH.shape[1]), float("nan"), dtype=y_RH.dtype)
    y[: y_RH.shape[0]] = y_RH
    return y.cuda()


def summing_nodes(backend: NvlinkLowLatencyBackend) -> tuple[int, ...]:
    """Nodes of the ranks, as far as their outputs are summed by node: all of one, but where copies go by node."""
    group = backend.group
    return group.node_of_rank if backend.kernels.shape.layered else (0,) * group.size


def sum_per_rank(
    rank: int, config: EPConfig, nodes: Sequence[int], tokens: Sequence[SentTokens], outputs: Sequence[Tensor]
) -> Tensor:
    """combine_recv when each rank sums its outputs of a token in fp32 and rounds, and these are summed by node, rounded
    if it is not the owner's, and by the owner: bits."""
    per_rank = config.num_slots // len(tokens)
    mine = tokens[rank]
    of_node = {node: torch.zeros(mine.x_TH.shape[0], config.hidden_size) for node in nodes}
    for holder, output in enumerate(outputs):
        y = of_node[nodes[holder]]
        share, any_row = torch.zeros_like(y), torch.zeros(len(y), dtype=torch.bool)
        rows = {route[1:]: i for i, route in enumerate(reference.routes_to(holder, config, tokens))}
        for token, chosen in enumerate(mine.slot_idx_TK.tolist()):
            for k, slot in enumerate(chosen):
                if slot >= 0 and slot // per_rank == holder:
                    share[token] += mine.topk_weights_TK[token, k] * output[rows[rank, token, k]].float()
                    any_row[token] = True
        of_node[nodes[holder]] = torch.where(any_row[:, None], y + share.to(config.dtype).float(), y)
    rounded = [y if node == nodes[rank] else y.to(config.dtype).float() for node, y in sorted(of_node.items())]
    return sum(rounded[1:], rounded[0]).to(config.dtype)


def check_once(backend: NvlinkLowLatencyBackend, everyone: Sequence[SentTokens], calls: str) -> None:
    """One dispatch and combine, compared bit for bit. calls: "single", "ahead" (receives started) or "fused"."""
    config, rank = backend.config, backend.group.rank
    mine = everyone[rank]
    x, slots, weights = mine.x_TH.cuda(), mine.slot_idx_TK.cuda(), mine.topk_weights_TK.cuda()
    if calls != "fused":
        handle = backend.dispatch_send(x, slots, weights)
        if calls == "ahead":
            backend.dispatch_start(handle)
        received = backend.dispatch_recv(handle)
    else:
        handle, received = backend.dispatch(x, slots, weights)
    got, want = filled(received), reference.received(rank, config, everyone)
    assert_same_bits(got.recv_count_E, want.recv_count_E, "recv_count_E")
    assert_same_bits(got.x_RH.view(torch.uint8), want.x_RH.view(torch.uint8), "x_RH")
    if want.scale_RG is not None:
        assert got.scale_RG is not None
        assert_same_bits(got.scale_RG, want.scale_RG, "scale_RG")
    outputs = [expert_output(config, r, reference.received(r, config, everyone)) for r in range(backend.group.size)]
    y = padded(outputs[rank], backend)
    if calls == "fused":
        y_TH = backend.combine(y, handle)
    else:
        backend.combine_send(y, handle)
        if calls == "ahead":
            backend.combine_start(handle)
        y_TH = backend.combine_recv(handle)
    combined = reference.combined if config.exact_combine else sum_per_rank
    want_TH = combined(rank, config, summing_nodes(backend), everyone, outputs)
    assert_same_bits(y_TH.cpu(), want_TH, "y_TH")


def one_round(tokens: Sequence[SentTokens]) -> list[SentTokens]:
    return [dataclasses.replace(t, num_rounds=1) for t in tokens]


def random_shapes(group: EPGroup, seed: int, cases_per_shape: int, shapes: Sequence[Sequence] = SHAPES) -> None:
    rng = random.Random(seed)
    num_cases = 0
    for shape in shapes:
        config, num_sms = make_config(group, shape), rng.choice([1, 3, 16, 64, None])
        backend = make(group, config, num_sms=num_sms)
        for case in range(cases_per_shape):
            everyone = one_round(make_tokens(rng, config, group.size, SKEWS[(case + num_cases) % len(SKEWS)]))
            if group.rank == 0:
                print(shape, num_sms, case, flush=True)
            poison(backend)
            check_once(backend, everyone, rng.choice(["single", "ahead", "fused"]))
        num_cases += cases_per_shape
        backend.close()


def two_in_flight(group: EPGroup) -> None:
    """Two handles overlap, sent and completed in order; each keeps its own rows."""
    config = make_config(group, SHAPES[3])
    backend = make(group, config)
    rng = random.Random(5)
    for _ in range(4):
        both = [one_round(make_tokens(rng, config, group.size, "uniform")) for _ in range(2)]
        poison(backend)
        handles = [
            backend.dispatch_send(*(t.cuda() for t in (m.x_TH, m.slot_idx_TK, m.topk_weights_TK)))
            for m in (everyone[group.rank] for everyone in both)
        ]
        received = [backend.dispatch_recv(handle) for handle in handles]
        all_outputs = []
        for everyone, handle, got in zip(both, handles, received):
            want = reference.received(group.rank, config, everyone)
            assert_same_bits(filled(got).x_RH, want.x_RH, "x_RH")
            outputs = [expert_output(config, r, reference.received(r, config, everyone)) for r in range(group.size)]
            all_outputs.append(outputs)
            backend.combine_send(padded(outputs[group.rank], backend), handle)
        for everyone, handle, outputs in zip(both, handles, all_outputs):
            want_TH = reference.combined(group.rank, config, summing_nodes(backend), everyone, outputs)
            assert_same_bits(backend.combine_recv(handle).cpu(), want_TH, "y_TH")
    backend.close()


def many_epochs(group: EPGroup, num_steps: int) -> None:
    """Changing token counts and routings, no synchronisation in between: no hang, no stale read."""
    config = make_config(group, (1024, 8, 4, 64, "same", False))
    backend = make(group, config)
    run_epochs(group, backend, config, num_steps, [0, 1, 2, 31, 64])


def graph_replay(group: EPGroup) -> None:
    """A captured step, replayed with new tokens in the same tensors, between eager steps."""
    config = make_config(group, (2048, 8, 4, 32, "same", False))
    backend = make(group, config)
    x = torch.zeros(32, 2048, dtype=torch.bfloat16, device="cuda")
    slots = torch.zeros(32, 4, dtype=torch.int64, device="cuda")
    weights = torch.zeros(32, 4, device="cuda")
    identity_step(backend, x, slots, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # three layers, so that buffers turn inside the graph
            y = identity_step(backend, x, slots, weights)
    generator = torch.Generator("cuda").manual_seed(100 + group.rank)
    for step in range(40):
        x.copy_(torch.randn(x.shape, device="cuda", generator=generator))
        slots.copy_(torch.randint(-1, config.num_slots, slots.shape, device="cuda", generator=generator))
        weights.copy_(torch.rand(weights.shape, device="cuda", generator=generator))
        y.fill_(float("nan"))
        graph.replay()
        assert_near(y, expected_identity(x, slots, weights), f"replay {step}")
        if step % 5 == 0:
            assert_near(identity_step(backend, x, slots, weights), expected_identity(x, slots, weights), "eager")
    backend.close()


def bad_input(group: EPGroup) -> None:
    config = make_config(group, (2048, 8, 4, 32, "same", False))
    backend = make(group, config)
    x, weights = torch.zeros(2, 2048, dtype=torch.bfloat16, device="cuda"), torch.ones(2, 4, device="cuda")
    slots = torch.zeros(2, 4, dtype=torch.int64, device="cuda")

    def refused(call, *words: str) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            assert all(word in str(error) for word in (f"[rank {group.rank}/{group.size}]", *words)), error
            return
        raise AssertionError(f"nothing was raised; expected {words}")

    refused(lambda: backend.dispatch_send(x.cpu(), slots, weights), "x_TH is on cpu")
    refused(lambda: backend.dispatch_send(x, slots, weights, 2), "num_rounds=2")
    refused(lambda: backend.mask_rank(group.rank), "mask_rank")
    refused(lambda: make_backend("nvlink", dataclasses.replace(config, hidden_size=2050), group), "multiple of 16")
    for bad in (1 << 33, config.num_slots, -2):  # the lower half of the first would be slot 0
        slots[1, 2] = bad
        handle, received = backend.dispatch(x, slots, weights)
        torch.cuda.synchronize()
        refused(functools.partial(backend.combine, received.x_RH, handle), f"slot_idx_TK[1, 2] = {bad} ", "-1 to mask")
        backend.combine(received.x_RH, handle)  # an error is told once, and the entry was left out
    backend.close()
    refused(lambda: backend.dispatch_send(x, slots, weights), "closed")


def fp8_power_of_two_scales(group: EPGroup) -> None:
    """ue8m0: every scale is a power of two, and values stay within the format's error."""
    config = make_config(group, (1024, 4, 2, 16, "fp8", False))
    backend = make(group, config)
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(3)).bfloat16().cuda()
    slots = torch.arange(32, device="cuda", dtype=torch.int32).view(16, 2) % 4 + 4 * group.rank  # stay on this rank
    rows = backend._rows[0]
    backend.kernels.bind(0, dataclasses.replace(rows, scale_format=POWER_OF_TWO))
    backend.kernels.dispatch(0, 16, x, slots, torch.ones(16, 2, device="cuda"), SEND | RECV)
    torch.cuda.synchronize()
    assert rows.scale is not None
    scale = rows.scale[:32]
    assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)
    rows_of_slot = [(slots == 4 * group.rank + e).any(1).nonzero().flatten() for e in range(4)]
    want = x[torch.cat(rows_of_slot)].float()
    got = rows.x[:32].float() * scale.repeat_interleave(128, 1)
    assert float((got - want).norm() / want.norm()) < 0.04
    group.barrier()
    backend.close()
