"""What every rank does in test_model_ranks.py. Requests are dealt out to the ranks; ranks that run out of them idle."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eprt import EngineConfig, EPGroup
from eprt.models import parallel_reader
from eprt.models.loader import load_model
from eprt.models.parallel_reader import byte_ranges
from tests.paged import PagedRunner
from tests.ranks import cases_moe

NUM_NEW = 5


def all_cases(group: EPGroup, root: str, variants: list[str], out: str, exact: bool = True):
    """EPMoE, every variant as it is, one in bf16, and what the loader reads; rank 0 writes all logits to out."""
    cases_moe.all_cases(group, root, exact)
    results = {}
    for variant in variants:
        results.update(goldens(group, Path(root) / variant, "auto"))
    results.update(goldens(group, Path(root) / "v3", "bfloat16"))
    if group.rank == 0:
        torch.save(results, out)
    reads_only_its_experts(group, f"{root}/v3")
    if group.size > 1:
        one_rank_cannot_load(group, f"{root}/v3")
        one_rank_has_another_model(group, f"{root}/v3")


def goldens(group: EPGroup, directory: Path, dtype: str) -> dict:
    """Every prompt, whole and in chunks (then with two-batch overlap), then greedy decoding: (name, dtype, chunk,
    prompt) -> logits.

    In its own dtype, fp32, a model must give transformers' logits and tokens; bf16 may change a token's experts.
    """
    golden = torch.load(directory / "golden.pt")
    model = load_model(EngineConfig(str(directory), dtype=dtype), group)
    results = {}
    for chunk, overlap in ((1000, "none"), (16, "tbo")):
        mine = run(group, model, golden["prompts"], chunk, overlap)
        for index, (logits, tokens) in mine.items():
            if dtype == "auto":
                difference = (logits - golden["logits"][index]).abs().max().item()
                assert difference < 1e-4, (directory.name, chunk, index, difference)
                assert tokens == golden["tokens"][index], (directory.name, chunk, index)
        for part in group.allgather(mine):
            results.update({(directory.name, dtype, chunk, index): logits for index, (logits, _) in part.items()})
    model.close()
    return results


def run(group: EPGroup, model, prompts: list[list[int]], chunk: int, overlap: str) -> dict:
    """This rank's share of the prompts: index -> (logits of the prompt, greedy tokens)."""
    indices = range(group.rank, len(prompts), group.size)
    # Known beforehand, as a step needs all ranks: one that waits for the others' count would leave them waiting for it.
    own_steps = sum(-(-len(prompts[index]) // chunk) + NUM_NEW - 1 for index in indices)
    all_steps = max(group.allgather(own_steps))
    runner = PagedRunner(model, overlap=overlap)
    mine = {}
    for index in indices:
        request = runner.request(prompts[index])
        logits = runner.prefill(request, chunk)
        mine[index] = (logits, runner.continue_greedy(request, logits, NUM_NEW))
    assert runner.num_steps == own_steps
    while runner.num_steps < all_steps:
        runner.idle_step()
    return mine


def reads_only_its_experts(group: EPGroup, directory: str):
    """Counts which bytes of the files are read, through the only door to them."""
    where = {name: r for path in Path(directory).glob("*.safetensors") for name, r in byte_ranges(path).items()}
    touched: list[str] = []

    def spy(handle: int, views: list[memoryview], extent) -> None:
        end = extent.start + extent.size
        touched.extend(
            name for name, r in where.items() if r.path == extent.path and r.start < end and extent.start < r.end
        )
        real_fill(handle, views, extent)

    real_fill, parallel_reader._fill = parallel_reader._fill, spy
    try:
        model = load_model(EngineConfig(directory), group)
    finally:
        parallel_reader._fill = real_fill
    model.close()
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in touched if ".experts." in name}
    held = [set(part) for part in group.allgather(experts)]
    assert sorted(expert for part in held for expert in part) == list(range(16)), held
    assert "model.embed_tokens.weight" in touched and len(touched) == len(set(touched))
    assert {name for name in touched if ".experts." in name} == {
        f"model.layers.{layer}.mlp.experts.{expert}.{p}_proj.weight"
        for layer in (1, 2)
        for expert in experts
        for p in ("gate", "up", "down")
    }


def one_rank_cannot_load(group: EPGroup, directory: str):
    """The last rank looks into an empty place; every rank must say so instead of waiting for it."""
    last = group.size - 1
    model_dir = directory if group.rank != last else f"{directory}/missing"
    try:
        load_model(EngineConfig(model_dir), group)
    except (RuntimeError, ValueError) as error:
        assert "missing" in str(error), error
        assert group.rank == last or f"rank {last} could not load the model" in str(error), error
    else:
        raise AssertionError("loading succeeded")


def one_rank_has_another_model(group: EPGroup, directory: str):
    """The last rank's host has a model of the same shape, trained a little further, or of another shape."""
    last = group.size - 1
    for field, change in (("weights", _trained_further), ("routed_scaling_factor", _scaled_otherwise)):
        with tempfile.TemporaryDirectory() as copy:
            model_dir = directory
            if group.rank == last:
                model_dir = shutil.copytree(directory, copy, dirs_exist_ok=True)
                change(Path(copy))
            with pytest.raises(ValueError, match=f"rank {last} has another model in .* than rank 0 .*{field}"):
                load_model(EngineConfig(model_dir), group)


def _trained_further(directory: Path):
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] += 0.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _scaled_otherwise(directory: Path):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "routed_scaling_factor": 1.75}))
