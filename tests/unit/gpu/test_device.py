"""Which device a rank gets."""

from types import SimpleNamespace

import pytest
import torch

from eprt import EngineConfig, EPGroup
from eprt.gpu.device import take_device
from eprt.models.loader import load_model
from tests.paths import DEMO


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_said_with_its_remedy():
    assert take_device("cpu", EPGroup.single()).type == "cpu"
    assert take_device("auto", EPGroup.single()).type == "cpu"
    with pytest.raises(ValueError, match=r"--device cuda: rank 0 on .* has no NVIDIA GPU .* or use --device cpu"):
        load_model(EngineConfig(DEMO, device="cuda"), EPGroup.single())


def test_a_rank_takes_the_gpu_that_was_chosen_for_it(monkeypatch):
    taken, uuids = [], ["one", "two", "three"]
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 3,
        "get_device_properties": lambda number: SimpleNamespace(uuid=uuids[number]),
        "set_device": taken.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    group = EPGroup.single()
    assert take_device("cuda", group) == taken[-1] == torch.device("cuda", 0)
    group.gpus = ("three",)
    assert take_device("cuda", group) == taken[-1] == torch.device("cuda", 2)
    group.gpus = ("four",)
    with pytest.raises(ValueError, match="this process does not see the GPU four; it sees one, two, three"):
        take_device("cuda", group)
