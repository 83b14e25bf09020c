"""EPMoE over ranks: transformers' results, and one rank's bits inside a node."""

import os
import subprocess

import pytest

from eprt import env
from tests.ranks.launch import ROOT, mpirun, run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_moe_over_ranks(num_ranks):
    run_ranks(num_ranks, "tests.ranks.cases_moe:all_cases")


@pytest.mark.parametrize("num_ranks, per_node", [(4, 2), (3, 1), (4, 3)])
def test_moe_over_virtual_nodes(num_ranks, per_node):
    run_ranks(num_ranks, "tests.ranks.cases_moe:near_enough", extra_env={"EPRT_RANKS_PER_NODE": str(per_node)})


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_example_patches_whole_models(num_ranks):
    done = subprocess.run(
        mpirun(num_ranks, "examples/patch_hf_model.py"),
        cwd=ROOT,
        env={**env.mpi_environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("DeepSeek V2", "DeepSeek V3", "Qwen3-MoE", "Mixtral"):
        assert f"{name}: {num_ranks} ranks" in done.stdout
    assert done.stdout.count("greedy tokens equal") == 4
