"""What the builder of DeepSeek models refuses."""

import pytest
import torch

from eprt import EngineConfig, EPGroup
from eprt.models.deepseek_builder import load_deepseek
from tests.paths import DEMO


def test_int8_is_refused_where_auto_finds_gpus():
    engine = EngineConfig(DEMO, device="auto", quantization="int8")
    with pytest.raises(ValueError, match=r"--quantization int8: .* --device auto found GPUs; use --device cpu"):
        load_deepseek(engine, EPGroup.single(), device=torch.device("cuda"))
