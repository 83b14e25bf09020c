"""What every test may rely on: mpirun is found and may start ranks, random numbers are the same in every run, and tests
that need a GPU are skipped by name where there is none."""

import os
import random
import sys
import sysconfig
import zlib

import hypothesis
import numpy as np
import pytest

from eprt import env

# pytest may have been started by path, without activating the virtual environment that holds mpirun.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
os.environ.update({**env.mpi_environment(), **env.MPI_ENVIRONMENT})
# Ranks of MPI that wait for each other let those run that have something to do: here are more of them than cores.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
# A proxy is for other machines; these tests talk to this one alone.
os.environ.update(no_proxy="*", NO_PROXY="*")
# Tests start some thousand Python processes: the first of them compiles, the others read.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tiny tensors, and often other processes beside this one: waiting for a second thread took 100 times the work itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, so that a red test is red again. Explore with --hypothesis-profile=explore.
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
# 20,000 drawn plans: `make properties`.
hypothesis.settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=20_000)
hypothesis.settings.load_profile("reproducible")


@pytest.fixture(autouse=True)
def _seeded(request):
    """Every test starts from its own fixed seed, whatever ran before it."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@pytest.fixture(scope="module")
def hosts():
    """Two hosts made of namespaces: their addresses, and for each the command that runs a program there."""
    from tests.ranks.launch_wire import need_namespaces, two_hosts

    need_namespaces()
    with two_hosts() as made:
        yield made


def pytest_collection_modifyitems(items):
    needing = [item for item in items if item.get_closest_marker("gpu") or "tests/gpu/" in item.nodeid]
    if needing and not _has_gpu():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
