"""An engine whose experts move: its requests, placements, jobs, and what must be true of its weights and memory."""

from collections.abc import Callable, Sequence

import numpy as np
from eprt.balancer.migration import schedule_rounds

from eprt import EPGroup, SamplingParams
from eprt.config import EngineConfig
from eprt.engine.engine import Engine
from eprt.engine.tokenizer import Tokenizer
from eprt.ep.migration.job import MigrationJob
from tests.ranks.shared_copies import share_experts

VOCAB = 128


def make_engine(group: EPGroup, directory: str, *, between_peers: bool = False, **options) -> Engine:
    """between_peers: experts travel as between GPUs."""
    options = {"kv_cache_gb": 0.01, "num_redundant_experts": 6, "chunk_size": 24, **options}
    engine = Engine(EngineConfig(directory, **options), group)
    if between_peers:
        share_experts(engine)
    return engine


def add_requests(engine: Engine, num_requests: int = 6, max_tokens: int = 80, texts: Sequence[str] = ()) -> None:
    """Greedy and sampled, with prompts that take several chunks. texts: the prompts, instead of random ones."""
    rng = np.random.default_rng(engine.group.rank)
    tokenizer = Tokenizer(engine.config.model_dir) if texts else None
    for i in range(num_requests):
        if tokenizer is not None:
            prompt = tokenizer.encode(texts[(i + engine.group.rank) % len(texts)])
        else:
            prompt = rng.integers(2, VOCAB, rng.integers(1, 60)).tolist()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
        engine.add_request(f"{i}", prompt, params)


def run(engine: Engine, between: Callable[[int], None] = lambda step: None, max_steps: int = 5000) -> list:
    """(request, token) of every computing step; `between` is called before each."""
    steps = []
    for step in range(max_steps):
        between(step)
        result = engine.step()
        if result.outputs:
            steps.append(sorted((output.request_id, output.token_id) for output in result.outputs))
        if result.all_idle:
            return steps
    raise AssertionError(f"not idle after {max_steps} steps: {engine.migrator.status()}")


def random_target(rng: np.random.Generator, rows: list[list[int]]) -> np.ndarray:
    """Another valid placement of the same slots: permuted, with other replicas, sometimes with empty slots."""
    num_experts = max(map(max, rows)) + 1
    target = []
    for row in rows:
        spare = rng.integers(-1, num_experts, len(row) - num_experts)
        target.append(rng.permutation(np.concatenate([np.arange(num_experts), spare])))
    return np.array(target)


def make_job(engine: Engine, job_id: int, target_LP, spare: int = 2, **options) -> MigrationJob:
    migrator = engine.migrator
    rounds = schedule_rounds(np.array(migrator.rows), target_LP, engine.group.node_of_rank, spare)
    return MigrationJob(
        job_id, migrator.status().epoch, tuple(rounds), **{"chunk_bytes": 5000, "timeout_s": 20.0, **options}
    )


def digests(engine: Engine) -> dict:
    """(layer, expert) -> the bytes of the expert as this rank holds it; equal in all of its slots."""
    found = {}
    for row, layer in enumerate(engine.model.moe_layers()):
        for expert, buffer in zip(layer.expert_of_slot, layer.weight_buffers()):
            assert (expert >= 0) == (buffer >= 0)
            if expert >= 0:
                content = b"".join(part[buffer].cpu().numpy().tobytes() for part in layer.pool.parts)
                assert found.setdefault((row, expert), content) == content
    return found


def check_weights(engine: Engine, want: dict) -> None:
    for key, content in digests(engine).items():
        assert content == want[key], f"layer, expert {key} is damaged on rank {engine.group.rank}"


def check_memory(engine: Engine, spare: int) -> None:
    """Every weight buffer is used by a slot or free; as many are free as there are spare ones and slots without."""
    layers = engine.model.moe_layers()
    pool = layers[0].pool
    used = [{s for s in layer.weight_buffers() if s >= 0} for layer in layers]
    assert len(set().union(*used)) == sum(map(len, used)), "two layers share a weight buffer"
    num_slots = sum(len(layer.weight_buffers()) for layer in layers)
    assert len(pool._free) + sum(map(len, used)) == num_slots + spare
    status = engine.migrator.status()
    assert status.used_bytes <= spare * pool.expert_bytes == status.cap_bytes < status.buffer_bytes


def everyones_digests(group: EPGroup, engine: Engine) -> dict:
    return {key: content for part in group.allgather(digests(engine)) for key, content in part.items()}
