"""Ranks that share attention, each for heads of its own: answers, to the bit, are those of one rank."""

import pytest

from tests import tiny
from tests.ranks.launch_host import run_host_ranks
from tests.ranks.launch_torch import assert_all_ended_well

CASES = "tests.ranks.cases_attention_tp"


def checkpoint(directory, variant: str, num_heads: int, **overrides) -> str:
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    tiny.save(tiny.make_variant(variant, **heads, **overrides), directory)
    return str(directory)


# Teams of all ranks and of some; heads that can be shared evenly and not; queries with and without a latent; biases.
@pytest.mark.parametrize(
    "num_ranks, size, variant, num_heads",
    [(2, 2, "v3_plain", 4), (3, 3, "v2_lite", 4), (4, 2, "v3", 5), (7, 7, "v3", 9)],
)
def test_answers_are_those_of_one_rank(num_ranks, size, variant, num_heads, tmp_path):
    directory = checkpoint(tmp_path, variant, num_heads)
    assert_all_ended_well(run_host_ranks(num_ranks, f"{CASES}:run_all", directory=directory, size=size))


def test_blocks_of_fp8_weights_stay_whole(tmp_path):
    """Heads share them here, eight and eight."""
    sizes = {"qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 80, "hidden_size": 512}
    directory = checkpoint(tmp_path, "v3", 16, **sizes)
    tiny.quantize_checkpoint(tmp_path)
    assert_all_ended_well(run_host_ranks(2, f"{CASES}:of_fp8", directory=directory))


def test_what_does_not_fit_is_refused_before_anything_is_loaded(tmp_path):
    directory, v32 = checkpoint(tmp_path / "v3", "v3", 2), str(tmp_path / "v32")
    tiny.save(tiny.make_variant("v32"), tmp_path / "v32")
    assert_all_ended_well(run_host_ranks(3, f"{CASES}:refused", directory=directory, v32=v32))
