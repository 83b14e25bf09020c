"""Experts on the move: tokens stay the same, memory stays bounded, and whatever fails leaves the old placement."""

import shutil
import signal
from pathlib import Path

import pytest

from tests import tiny
from tests.ranks.launch import run_ranks
from tests.ranks.launch_torch import finish, run_torch_ranks, start_torch_ranks

CASES, FAILURES = "tests.ranks.cases_migration", "tests.ranks.cases_migration_failures"
DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "checkpoint"
TEXTS = ["What is 12 + 30?", "Sort: pear, fig, apple", "Spell castle backwards.", "Count from 3 to 40.", "Hello!"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A bf16 checkpoint, and one with fp8 matrices and scales."""
    import torch

    root = tmp_path_factory.mktemp("migration")
    bf16, fp8 = root / "bf16", root / "fp8"
    tiny.save(tiny.make_model("v3", dtype=torch.bfloat16), bf16)
    tiny.save(tiny.make_model("v3"), fp8)
    tiny.quantize_checkpoint(fp8)
    return [str(bf16), str(fp8)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_moving_experts_changes_no_token(checkpoints, num_ranks, tmp_path):
    """On 2 ranks of MPI; on 4 also the demo model. More of it: benchmarks/balancing/bench_migration.py --tokens."""
    demo = []
    if num_ranks == 4:
        fp8 = Path(shutil.copytree(DEMO, tmp_path / "fp8"))
        tiny.quantize_checkpoint(fp8)
        demo = [str(DEMO), str(fp8)]
    run = run_ranks if num_ranks == 2 else run_torch_ranks
    run(num_ranks, f"{CASES}:run_all", directories=checkpoints, demo=demo, texts=TEXTS)


@pytest.mark.parametrize("num_ranks, ranks_per_node", [(4, 2), (7, 3)])
def test_between_nodes(checkpoints, num_ranks, ranks_per_node):
    """Sums are grouped by node, so tokens may change in the last bit; weights may not."""
    run = run_ranks if num_ranks == 4 else run_torch_ranks
    run(
        num_ranks,
        f"{CASES}:run_all",
        directories=checkpoints[1:],
        exact=False,
        extra_env={"EPRT_RANKS_PER_NODE": str(ranks_per_node)},
    )


@pytest.mark.parametrize("step", [25, 31])
def test_a_rank_dies_while_experts_move(checkpoints, step):
    """Plain processes: mpirun would end the survivors before they can say what they hold."""
    processes = start_torch_ranks(4, f"{FAILURES}:rank_dies", directory=checkpoints[1], at_step=step)
    results = finish(processes, timeout_s=400)
    assert results[1][0] == -signal.SIGKILL, results[1]
    survivors = [results[rank] for rank in (0, 2, 3)]
    assert all(status == 0 for status, _ in survivors), survivors
    found = {output.strip().splitlines()[-1] for _, output in survivors}
    assert len(found) == 1 and found.pop().startswith("SURVIVED with epoch"), survivors
