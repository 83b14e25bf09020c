"""Which device a rank gets."""

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
