"""A driver that hands out memory of the host in place of a GPU's (fake_memory.py)."""

from types import SimpleNamespace

import pytest
import torch

from eprt.gpu import driver, shared_allocation, symmetric
from tests.unit.gpu.fake_memory import FakeDriver


@pytest.fixture
def fake(monkeypatch):
    made = FakeDriver()
    for module in (driver, shared_allocation, symmetric):
        monkeypatch.setattr(module, "api", lambda: made)
    zeros = torch.zeros
    for name, value in {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "synchronize": lambda: None,
        "get_device_properties": lambda device: SimpleNamespace(uuid="GPU-a"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda *args, device=None, **kwargs: zeros(*args, **kwargs))
    return made
