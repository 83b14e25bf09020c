"""DeepSeek's EPLB as a peer: a stand-in for its file is loaded and compared."""

import numpy as np
import pytest

from benchmarks.balancing import eplb_peer

STAND_IN = """
import torch
from eprt.balancer import rebalance_experts as ours

def rebalance_experts(weight, *shape):
    order = torch.sort(weight, dim=1, descending=True)  # as EPLB's, whose ties may fall either way
    assert order.indices.shape == weight.shape
    return tuple(torch.from_numpy(array) for array in ours(weight.numpy(), *shape))
"""


def test_equal_maps_are_parity(tmp_path):
    (tmp_path / "eplb.py").write_text(STAND_IN)
    eplb = eplb_peer.load(tmp_path / "eplb.py")
    load_LE = np.random.default_rng(0).lognormal(size=(2, 8))
    columns = eplb_peer.parity(eplb, load_LE, {"num_slots": 12, "num_groups": 4, "num_nodes": 2, "num_gpus": 4})
    assert columns == {
        "largest_load_difference": 0.0,
        "slots_equal_to_stable_eplb": 1.0,
        "slots_equal_to_eplb": 1.0,
        "counts_equal": True,
        "layers_even_above_eplb": 0,
    }


def test_a_file_that_is_not_python_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="is not a Python file"):
        eplb_peer.load(tmp_path / "eplb.txt")
