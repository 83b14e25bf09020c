"""Fixtures that several test files share."""

from collections.abc import Iterator

import pytest

from eprt.gpu import shapes
from eprt.ops import native
from tests.fake_gpu import FakeGpu


@pytest.fixture(params=native.ISA_NAMES)
def isa(request):
    """Runs the test once for each instruction set of this CPU, and skips by name those it lacks."""
    native.load()
    if native.ISA_NAMES.index(request.param) > native.ISA_NAMES.index(native.detected_isa()):
        pytest.skip(f"this CPU has no {request.param}")
    native.set_isa(request.param)
    yield request.param
    native.set_isa(native.detected_isa())


@pytest.fixture
def gpu(monkeypatch) -> Iterator[FakeGpu]:
    """Where a GPU is, but computes nothing."""
    shapes.known_shape.cache_clear()
    yield FakeGpu(monkeypatch)
    shapes.known_shape.cache_clear()
