"""What every rank does in test_model_ranks.py. Requests are dealt out to the ranks; ranks that run out of them idle."""

from pathlib import Path

import torch

from eprt import EngineConfig, EPGroup
from eprt.models import checkpoint
from eprt.models.loader import load_model
from tests.paged import PagedRunner

NUM_NEW = 5


def goldens(group: EPGroup, root: str, variants: list[str], out: str, dtype: str = "auto", tolerance: float = 1e-4):
    """Every prompt of every variant, whole and in chunks, then greedy decoding; rank 0 writes all logits to out."""
    results = {}
    for variant in variants:
        golden = torch.load(Path(root) / variant / "golden.pt")
        model = load_model(EngineConfig(str(Path(root) / variant), dtype=dtype), group)
        for chunk in (1000, 16):
            mine = run(group, model, golden["prompts"], chunk)
            for index, (logits, tokens) in mine.items():
                difference = (logits - golden["logits"][index]).abs().max().item()
                assert difference < tolerance, (variant, chunk, index, difference)
                if dtype == "auto":
                    assert tokens == golden["tokens"][index], (variant, chunk, index)
            for part in group.allgather(mine):
                results.update({(variant, chunk, index): logits for index, (logits, _) in part.items()})
        model.close()
    if group.rank == 0:
        torch.save(results, out)


def run(group: EPGroup, model, prompts: list[list[int]], chunk: int) -> dict:
    """This rank's share of the prompts: index -> (logits of the prompt, greedy tokens)."""
    runner = PagedRunner(model)
    mine = {}
    for index in range(group.rank, len(prompts), group.size):
        request = runner.request(prompts[index])
        logits = runner.prefill(request, chunk)
        mine[index] = (logits, runner.continue_greedy(request, logits, NUM_NEW))
    steps = max(group.allgather(runner.num_steps))
    while runner.num_steps < steps:
        runner.idle_step()
    return mine


def reads_only_its_experts(group: EPGroup, directory: str):
    """Counts what is read of the file itself, through the only door to it."""
    touched: list[str] = []

    class Spy:
        def __init__(self, *args, **kwargs):
            self.file = real_open(*args, **kwargs)

        def get_tensor(self, name):
            touched.append(name)
            return self.file.get_tensor(name)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            view = self.file.get_slice(name)

            class Header:  # shape and dtype, but no data
                get_shape, get_dtype = view.get_shape, view.get_dtype

            return Header()

    real_open, checkpoint.safe_open = checkpoint.safe_open, Spy
    try:
        model = load_model(EngineConfig(directory), group)
    finally:
        checkpoint.safe_open = real_open
    model.close()
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in touched if ".experts." in name}
    held = [set(part) for part in group.allgather(experts)]
    assert sorted(expert for part in held for expert in part) == list(range(16)), held
    assert len(touched) == len(set(touched))
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
