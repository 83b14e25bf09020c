"""Fixtures that several test files of kernels share."""

import pytest

from eprt.ops import native


@pytest.fixture(params=native.ISA_NAMES)
def isa(request):
    """Runs the test once for each instruction set of this CPU, and skips by name those it lacks."""
    native.load()
    if native.ISA_NAMES.index(request.param) > native.ISA_NAMES.index(native.detected_isa()):
        pytest.skip(f"this CPU has no {request.param}")
    native.set_isa(request.param)
    yield request.param
    native.set_isa(native.detected_isa())
