"""The model on several ranks: transformers' logits and tokens on any number, and the very same bits inside a node."""

import pytest
import torch

from tests import tiny
from tests.ranks.cases_model import NUM_NEW
from tests.ranks.launch import run_ranks

CASES = "tests.ranks.cases_model"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory per variant, with its goldens; "fp8" is v3 quantised in blocks, and held to the rounded weights."""
    root = tmp_path_factory.mktemp("models")
    for variant in (*tiny.VARIANTS, "fp8"):
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
    """(ranks, dtype) -> all logits, after the ranks have compared them with transformers'."""
    seen = {}

    def get(num_ranks, dtype):
        if (num_ranks, dtype) not in seen:
            out = root / f"logits-{num_ranks}-{dtype}.pt"
            variants = [*tiny.VARIANTS, "fp8"] if dtype == "auto" else ["v3"]
            tolerance = 1e-4 if dtype == "auto" else 1.0
            run_ranks(
                num_ranks,
                f"{CASES}:goldens",
                root=str(root),
                variants=variants,
                out=str(out),
                dtype=dtype,
                tolerance=tolerance,
            )
            seen[num_ranks, dtype] = torch.load(out)
        return seen[num_ranks, dtype]

    return get


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_same_bits_on_any_number_of_ranks(logits_on, num_ranks, dtype):
    alone, together = logits_on(1, dtype), logits_on(num_ranks, dtype)
    assert alone.keys() == together.keys()
    for case, logits in alone.items():
        assert torch.equal(logits, together[case]), (case, (logits - together[case]).abs().max())


def test_virtual_nodes(root):
    run_ranks(
        4,
        f"{CASES}:goldens",
        extra_env={"EPRT_RANKS_PER_NODE": "2"},
        root=str(root),
        variants=["v3"],
        out=str(root / "nodes.pt"),
    )


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_each_rank_reads_only_its_experts(root, num_ranks):
    run_ranks(num_ranks, f"{CASES}:reads_only_its_experts", directory=str(root / "v3"))


def test_one_rank_that_cannot_load_stops_all(root):
    run_ranks(3, f"{CASES}:one_rank_cannot_load", directory=str(root / "v3"))
