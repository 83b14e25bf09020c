"""What every rank does in test_normal.py when more rows come than a static bound has room for."""

from collections.abc import Callable
from typing import Any

import torch

from eprt.compat.deep_ep.rows import RowExchange
from eprt.ep.errors import EPError
from eprt.ep.group.group import EPGroup
from tests.gpu.cases_normal import make, make_config, poison
from tests.gpu.identity import assert_near, expected_identity, identity_step
from tests.ranks.cases_ep import assert_same_bits


def expect_too_many(group: EPGroup, bound: int, call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except EPError as error:
        assert f"[rank {group.rank}/{group.size}]" in str(error) and f"room for {bound}" in str(error), error
        return
    raise AssertionError("nothing was raised")


def too_many_rows(group: EPGroup, exact: bool = False) -> None:
    """More than a static bound: what does not fit is left out of both ways and adds nothing, however much it is; the
    receiver's counts stay within its tensors; the ranks at either end are told; then all is as before."""
    T, bound = 32, 20
    config = make_config(group, (256, 2 * group.size, 2, T, "same", exact))
    backend, rank = make(group, config, num_sms=3, max_recv_rows=bound), group.rank
    weights = torch.ones(T, 2, device="cuda")
    for turn in range(3):
        x = torch.full((T, 256), float(1 + rank), dtype=torch.bfloat16, device="cuda")
        slots = torch.full((T, 2), -1, dtype=torch.int64, device="cuda")
        slots[:, turn % 2] = 1  # of rank 0; rows and items in order of rank and token
        if turn == 2:  # a token's other row is left out, though the token fits
            slots[:, 0], slots[:, 1] = 1, 0
        poison(backend)
        handle, received = backend.dispatch(x, slots, weights)
        fits = max(0, min(T, bound - rank * T))
        y = torch.full(received.x_RH.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
        count = received.recv_count_E.tolist()
        assert count == ([[0, bound], [bound, 0]][turn // 2] if rank == 0 else [0, 0]), count
        y[: sum(count)] = received.x_RH[: sum(count)]
        torch.cuda.synchronize()
        if rank == 0 or fits < T:
            expect_too_many(group, bound, backend.combine, y, handle)
        y_TH = backend.combine(y, handle)
        want = x.clone()
        want[fits:] = 0
        assert_same_bits(y_TH + 0.0, want, "y_TH")
        identity = torch.full((T, 2), -1, dtype=torch.int64, device="cuda")
        identity[:1] = 2 * rank
        assert_near(identity_step(backend, x, identity, weights), expected_identity(x, identity, weights), "after")
    torch.cuda.synchronize()
    group.barrier()
    backend.close()


def too_many_items(group: EPGroup) -> None:
    """The same of rows per token."""
    T, bound, rank = 32, 20, group.rank
    exchange = RowExchange(group, 1 << 22, timeout_s=20.0, num_sms=3)
    weights = torch.ones(T, 2, device="cuda")
    for bounded in (True, False, True):
        x = torch.full((T, 256), float(1 + rank), dtype=torch.bfloat16, device="cuda")
        idx = torch.full((T, 2), -1, dtype=torch.int64, device="cuda")
        idx[:, 1] = 0
        got = exchange.dispatch(
            x,
            num_experts=2 * group.size,
            topk_idx_TK=idx,
            topk_weights_TK=weights,
            num_worst_rows=bound if bounded else 0,
        )
        fits = max(0, min(T, bound - rank * T)) if bounded else T
        torch.cuda.synchronize()
        if fits < T or (bounded and rank == 0):
            expect_too_many(group, bound, exchange.combine, got.x_NH, got.handle)
        out, out_weights = exchange.combine(got.x_NH, got.handle, topk_weights_NK=got.topk_weights_NK)
        want = x.clone()
        want[fits:] = 0
        assert_same_bits(out + 0.0, want, "out")
        assert out_weights is not None and out_weights.sum() == fits
    torch.cuda.synchronize()
    group.barrier()
    exchange.close()
