"""What every rank does in test_migration.py: experts that move between GPUs while an engine generates."""

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import triton
from triton.language.extra.cuda import globaltimer

from eprt import EPGroup
from eprt.ep.migration.peer import Fetch, PeerTransport
from eprt.ep.migration.peer_copies import PeerCopies
from eprt.ep.migration.staged import StagedTransport
from eprt.gpu.driver import api, check
from eprt.gpu.peers import PeerTensors
from tests import tiny
from tests.gpu.cases_model import DEMO, TEXTS, generate
from tests.ranks import cases_migration
from tests.ranks.migrating_engine import (
    check_weights,
    everyones_digests,
    make_engine,
    make_job,
    random_target,
    run,
)

SIZES = {"num_redundant_experts": 4, "max_num_seqs": 8, "num_requests": 4, "max_tokens": 160, "num_layers": 3}


def same_tokens(group: EPGroup, *, exact: bool = True, **options) -> None:
    """Greedy and sampled tokens of every step, with experts on the move and without; recorded steps where there are."""
    options = {"device": "cuda", **SIZES, **options}
    cases_migration.same_tokens(group, str(DEMO), exact, TEXTS, **options)


def same_tokens_fp8(group: EPGroup) -> None:
    """fp8 experts, whose scales travel with them."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(group.allgather(scratch)[0]) / "fp8"
        if group.rank == 0:
            shutil.copytree(DEMO, directory)
            tiny.quantize_checkpoint(directory)
        group.barrier()
        cases_migration.same_tokens(group, str(directory), True, TEXTS, device="cuda", exact_combine=True, **SIZES)
        group.barrier()


def same_tokens_int8(group: EPGroup) -> None:
    same_tokens(group, dtype="bfloat16", exact_combine=True, quantization="int8")


def counts(group: EPGroup) -> None:
    """Choices and rows of replayed steps and of others are counted, padding is not."""
    for graph_sizes in ((8,), ()):
        generate(group, "cuda", dtype="float32", num_redundant_experts=4, graph_sizes=graph_sizes)


def through_host_memory(group: EPGroup) -> None:
    """The way that is left where GPUs do not reach each other: the same bytes arrive."""
    engine = make_engine(group, str(DEMO), device="cuda", dtype="float32", max_num_seqs=8)
    weights, migrator = everyones_digests(group, engine), engine.migrator
    assert migrator is not None and isinstance(migrator._transport, PeerTransport), migrator
    migrator._transport.close()
    migrator._transport = StagedTransport(group)
    target = random_target(np.random.default_rng(3), migrator.rows)
    migrator.offer(make_job(engine, 1, target))
    run(engine)
    assert migrator.status().state == "done" and migrator.rows == target.tolist()
    assert sum(group.allgather(migrator.status().received_bytes)) > 0
    check_weights(engine, weights)
    engine.close()


def damage(group: EPGroup) -> None:
    """A byte that changes on its way is found, in weights or in the last of the scales, and nothing is used."""
    engine = make_engine(group, str(DEMO), device="cuda", dtype="float32", max_num_seqs=8)
    weights, migrator = everyones_digests(group, engine), engine.migrator
    assert migrator is not None
    copies, target = migrator._transport._copies, random_target(np.random.default_rng(3), migrator.rows)
    fetch = copies.fetch

    def fetch_wrongly(fetches):
        """The last byte comes from elsewhere."""
        to, rank, tensor, offset = fetches[-1]
        return fetch([*fetches[:-1], Fetch(to[:-1], rank, tensor, offset), Fetch(to[-1:], rank, tensor, offset ^ 1)])

    if group.rank == group.size - 1:
        copies.fetch = fetch_wrongly
    for job_id, state in ((1, "rolled_back"), (2, "done")):
        migrator.offer(make_job(engine, job_id, target, chunk_bytes=None))
        run(engine)
        assert migrator.status().state == state, migrator.status()
        check_weights(engine, weights)
        copies.fetch = fetch
    engine.close()


@triton.jit
def _hold(nanoseconds):
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()


def copies_need_no_sm(group: EPGroup) -> None:
    """While every SM of this GPU is kept busy, all its threads taken, a copy from another one's memory arrives."""
    torch.cuda.set_device(group.rank % torch.cuda.device_count())
    mine = torch.full((64 << 20,), group.rank + 1, dtype=torch.uint8, device="cuda")
    arrived = torch.zeros_like(mine)
    torch.cuda.synchronize()
    peers = PeerTensors(group, [mine])
    copies, peer = PeerCopies(peers), (group.rank + 1) % group.size
    programs = 2 * torch.cuda.get_device_properties().multi_processor_count
    _hold[(programs,)](1000, num_warps=32)  # compiles it
    torch.cuda.synchronize()
    group.barrier()
    start, end, held = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    _hold[(programs,)](50_000_000, num_warps=32)
    held.record()
    with torch.cuda.stream(copies._stream):
        start.record()
        source = peers.address(peer, 0)
        check(api().cuMemcpyAsync(arrived.data_ptr(), source, len(mine), copies._stream.cuda_stream), "copying")
        end.record()
    end.synchronize()
    assert not held.query(), "the copy waited for the SMs"
    torch.cuda.synchronize()
    assert (arrived == peer + 1).all()
    milliseconds = start.elapsed_time(end)
    print(
        f"rank {group.rank}: 64 MiB beside busy SMs in {milliseconds:.3f} ms, {len(mine) / milliseconds / 1e6:.0f} GB/s"
    )
    work = copies.fetch([Fetch(arrived, peer, 0, 0)])
    alone = copies.sum_up([arrived])
    torch.cuda.synchronize()
    print(
        f"rank {group.rank}: with its checksum {work.seconds() * 1e3:.3f} ms, the checksum {alone.seconds() * 1e3:.3f}"
    )
    assert work.checksum() == alone.checksum()
    group.barrier()
    copies.close()


# case -> ranks and options. Ranks may share a GPU where nothing goes over NVLink.
ON_ONE_GPU = {
    "counts": (1, {}),
    "same_tokens": (1, {"dtype": "float32"}),  # nothing travels, but graphs are replayed
    "same_tokens_staged": (2, {"dtype": "float32"}),
    "through_host_memory": (2, {}),
    "damage": (2, {}),
}
ON_TWO_GPUS = {
    "same_tokens": {"dtype": "bfloat16", "exact_combine": True},
    "same_tokens_locally": {"dtype": "bfloat16", "exact_combine": True, "replica_routing": "local"},
    "same_tokens_fp8": {},
    "same_tokens_int8": {},
    "copies_need_no_sm": {},
}


def run_cases(group: EPGroup, names: list[str]) -> None:
    """One after the other in one job: starting ranks takes longer than most."""
    options = {**{name: options for name, (ranks, options) in ON_ONE_GPU.items() if ranks == group.size}}
    options = options if set(names) <= set(options) else ON_TWO_GPUS
    for name in names:
        start_s = time.monotonic()
        {"same_tokens_staged": same_tokens, "same_tokens_locally": same_tokens, **globals()}[name](
            group, **options[name]
        )
        if group.rank == 0:
            print(f"{name}: {time.monotonic() - start_s:.1f} s", flush=True)
