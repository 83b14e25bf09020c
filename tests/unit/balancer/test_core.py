"""The native planner: a library that is missing, of another version, or given what it cannot take."""

from types import SimpleNamespace

import numpy as np
import pytest
from eprt.balancer import core


@pytest.fixture
def reloaded():
    """load_library() looks for the library again, in this test and after it."""
    core.load_library.cache_clear()
    yield
    core.load_library.cache_clear()


def test_the_library_is_found_and_of_this_version():
    path = core.library_path()
    assert path is not None and path.name == core.LIBRARY
    assert core.load_library().eprt_balancer_version() == core.VERSION


def test_a_missing_library_tells_how_to_build_it(reloaded, monkeypatch):
    monkeypatch.setattr(core, "library_path", lambda: None)
    with pytest.raises(ImportError, match=r"eprt_balancer\.so\) is not built; run `make build`"):
        core.load_library()


def test_a_library_of_another_version_is_refused(reloaded, monkeypatch):
    monkeypatch.setattr(core, "VERSION", core.VERSION + 1)
    with pytest.raises(ImportError, match=f"version {core.VERSION - 1}, this Python code needs {core.VERSION}"):
        core.load_library()


def test_arrays_must_be_contiguous():
    with pytest.raises(ValueError, match=r"an array of shape \(2, 3\) is not C-contiguous"):
        core.call_native("eprt_eplb", np.zeros((2, 6))[:, ::2])


def test_an_error_of_the_library_is_a_value_error_with_its_message():
    first_E1, slots = np.array([0, 1]), np.array([0])
    replicas = core.CReplicas(1, 1, 1, 1, first_E1.ctypes.data, slots.ctypes.data, None, None)
    out = np.empty((1, 1), dtype=np.int64)
    with pytest.raises(ValueError, match="expert_idx_TK holds 7; the placement has experts 0 to 0"):
        core.call_native("eprt_assign", replicas, 1, 1, np.array([[7]]), np.array([1]), 0, out)


def test_threads_default_to_the_cores_of_this_process(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 5})
    assert core.num_threads(None) == 3 and core.num_threads(np.int64(7)) == 7
    for bad in (0, -1, 1.0, "2"):
        with pytest.raises(ValueError, match=r"threads=.*: must be an integer of at least 1"):
            core.num_threads(bad)


def test_a_structure_takes_the_attributes_of_its_fields():
    source = SimpleNamespace(
        num_tokens=np.int64(2), num_choices=True, topk_TK=np.array([[1], [2]]), node_T=np.array([3, 4]), weight_T=None
    )
    with pytest.raises(TypeError):
        core.as_struct(core.CTokens, source)
    source.weight_T = np.array([0.5, 2.0])
    struct = core.as_struct(core.CTokens, source)
    assert (struct.num_tokens, struct.num_choices) == (2, 1) and struct.node_T == source.node_T.ctypes.data
