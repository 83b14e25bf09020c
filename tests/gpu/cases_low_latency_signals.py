"""What every rank does in test_low_latency.py: a low-latency combine that starts before its rows exist."""

import random
import time
from collections.abc import Sequence

import torch

from eprt.ep import reference
from eprt.ep.errors import EPError
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.low_latency import Signal
from tests.gpu.cases_low_latency import make, make_config, one_round, padded, sum_per_rank, summing_nodes
from tests.ranks.cases_ep import assert_same_bits, expert_output, make_tokens


def tile_signals(group: EPGroup, exact: bool) -> None:
    """combine_send starts before the rows exist; they appear tile by tile, in the order of neither slots nor rows."""
    config = make_config(group, (2048, 6, 4, 48, "same", exact))
    backend = make(group, config)
    rng = random.Random(9)
    block_m, threshold = 16, 5
    slot_tiles = -(-group.size * 48 // block_m)
    sending = torch.cuda.Stream()
    for turn in range(3):
        everyone = one_round(make_tokens(rng, config, group.size, ("uniform", "one_rank", "masked")[turn]))
        mine = everyone[group.rank]
        handle, _ = backend.dispatch(mine.x_TH.cuda(), mine.slot_idx_TK.cuda(), mine.topk_weights_TK.cuda())
        outputs = [expert_output(config, r, reference.received(r, config, everyone)) for r in range(group.size)]
        whole = padded(outputs[group.rank], backend)
        count = reference.received(group.rank, config, everyone).recv_count_E.tolist()
        y = torch.full_like(whole, float("nan"))
        counter = torch.zeros(6 * slot_tiles, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(sending):
            backend.combine_send(y, handle, Signal(counter, threshold, block_m, slot_tiles, num_sms=3))
        begins = [sum(count[:e]) for e in range(6)]
        tiles = [(e, m) for e in range(6) for m in range(-(-count[e] // block_m))]
        random.Random(group.rank).shuffle(tiles)  # ranks have different numbers of tiles
        for e, m in tiles:
            rows = slice(begins[e] + m * block_m, begins[e] + min(count[e], (m + 1) * block_m))
            y[rows] = whole[rows]
            counter[e * slot_tiles + m] = threshold + (m % 2)  # at or past the threshold
        torch.cuda.synchronize()
        y_TH = backend.combine_recv(handle)
        combined = reference.combined if exact else sum_per_rank
        want_TH = combined(group.rank, config, summing_nodes(backend), everyone, outputs)
        assert_same_bits(y_TH.cpu(), want_TH, "y_TH")
    backend.close()


def missing_signal(group: EPGroup, timeout_s: float = 1.0, shape: Sequence = (2048, 6, 4, 48, "same", False)) -> None:
    """Tiles that never come end in an error that names the first, on the rank whose experts are late; one deadline is
    waited for, not one for each tile."""
    config = make_config(group, shape, timeout_s=timeout_s)
    backend = make(group, config)
    x = torch.ones(5, config.hidden_size, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([[1, -1, -1, -1]] * 5, device="cuda")  # of rank 0
    handle, received = backend.dispatch(x, slots, torch.ones(5, 4, device="cuda"))
    slot_tiles = group.size * config.num_max_tokens_per_rank
    counter = torch.zeros(config.num_slots // group.size * slot_tiles, dtype=torch.int32, device="cuda")
    y = torch.zeros(received.x_RH.shape, dtype=torch.bfloat16, device="cuda")
    rows = int(received.recv_count_E.sum())
    before = time.monotonic()
    backend.combine_send(y, handle, Signal(counter, 3, block_m=1, slot_tiles=slot_tiles, num_sms=1))
    torch.cuda.synchronize()
    assert time.monotonic() - before < max(4, rows - 2) * timeout_s, f"{rows} tiles were waited for one after another"
    try:
        backend.combine_recv(handle)
        assert rows == 0, "combine_recv did not report the missing tile"
    except EPError as error:
        assert rows > 0 and f"tile {slot_tiles}: signal 0, threshold 3" in str(error), error
    torch.cuda.synchronize()
    group.barrier()
    backend.close()
