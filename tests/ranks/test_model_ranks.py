"""EPMoE and the model on several ranks: transformers' logits and tokens, one rank's bits inside a node."""

import os
import subprocess

import pytest
import torch

from eprt import env
from tests import tiny
from tests.ranks.cases_model import NUM_NEW
from tests.ranks.cases_moe import FAMILIES, save_block
from tests.ranks.launch import ROOT, mpirun, run_ranks
from tests.ranks.launch_torch import run_torch_ranks

VARIANTS = (*tiny.VARIANTS, "fp8")  # fp8: v3 quantised in blocks, held to the rounded weights


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory per variant, with its goldens, and a file per MoE block."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_block(root, family)
    for variant in VARIANTS:
        model = tiny.make_variant("v3" if variant == "fp8" else variant)
        directory = tiny.save(model, root / variant)
        if variant == "fp8":
            tiny.quantize_checkpoint(directory)
            tiny.round_to_fp8_blocks(model)
        prompts = tiny.prompts(lengths=(1, 7, 40, 23, 12))
        golden = {
            "prompts": prompts,
            "logits": [tiny.golden_logits(model, prompt) for prompt in prompts],
            "tokens": [tiny.golden_greedy(model, prompt, NUM_NEW) for prompt in prompts],
        }
        torch.save(golden, directory / "golden.pt")
    return root


@pytest.fixture(scope="module")
def logits_on(root):
    """number of ranks -> all logits, after the ranks have compared them, and EPMoE, with transformers'. Two ranks are
    MPI's, the others torch.distributed's."""
    seen = {}

    def get(num_ranks):
        if num_ranks not in seen:
            out = f"{root}/logits-{num_ranks}.pt"
            cases = "tests.ranks.cases_model:all_cases"
            run = run_ranks if num_ranks == 2 else run_torch_ranks
            run(num_ranks, cases, root=str(root), variants=VARIANTS, out=out)
            seen[num_ranks] = torch.load(out)
        return seen[num_ranks]

    return get


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_same_bits_on_any_number_of_ranks(logits_on, num_ranks):
    alone, together = logits_on(1), logits_on(num_ranks)
    assert alone.keys() == together.keys() and len(alone) == 2 * 5 * (len(VARIANTS) + 1)
    for case, logits in alone.items():
        assert torch.equal(logits, together[case]), (case, (logits - together[case]).abs().max())


def test_moe_on_ranks_that_mostly_hold_two_experts(root):
    run_torch_ranks(7, "tests.ranks.cases_moe:all_cases", root=str(root))


def test_nodes_of_two_ranks(root):
    cases = "tests.ranks.cases_model:all_cases"
    arguments = {"root": str(root), "variants": ("v2_lite", "v3"), "out": f"{root}/nodes.pt", "exact": False}
    run_torch_ranks(4, cases, extra_env={"EPRT_RANKS_PER_NODE": "2"}, **arguments)


def test_nodes_of_one_rank(root):
    run_torch_ranks(
        3, "tests.ranks.cases_moe:all_cases", extra_env={"EPRT_RANKS_PER_NODE": "1"}, root=str(root), exact=False
    )


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_example_patches_whole_models(num_ranks):
    done = subprocess.run(
        mpirun(num_ranks, "examples/patch_hf_model.py"),
        cwd=ROOT,
        env={**env.mpi_environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("DeepSeek V2", "DeepSeek V3", "DeepSeek V3.2", "GLM-4-MoE", "Qwen3-MoE", "Mixtral"):
        assert f"{name}: {num_ranks} ranks" in done.stdout
    assert done.stdout.count("greedy tokens equal") == 6
