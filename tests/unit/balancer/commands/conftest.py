"""A load file for the subcommands."""

import numpy as np
import pytest
from eprt.balancer.formats import eprt_npz

from benchmarks.balancing.synthetic_load import drifting_load, topic_trace


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """32 experts, 6 windows that drift, tokens of a few topics."""
    trace = topic_trace(2, 1024, 32, 4, strength=1.5, num_topics=8, skew=0.3)
    load_WLE = np.floor(drifting_load(6, 2, 32, sigma=0.4, step=0.15) * trace.load(32))
    path = tmp_path_factory.mktemp("balance") / "load.npz"
    eprt_npz.write(path, load_WLE, trace)
    return path
