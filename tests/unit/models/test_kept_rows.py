"""Rows of tensors: what a rank reads that needs no more of a matrix."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eprt import EngineConfig
from eprt.models.checkpoint import Checkpoint, TensorSource
from eprt.models.deepseek_builder import open_checkpoint
from eprt.models.hf_config import read_model_config
from tests import tiny

PREFIX = "model.layers.1.self_attn."
KEPT = {f"{PREFIX}q_b_proj.weight": range(128, 256), f"{PREFIX}o_proj.weight": range(128, 200)}


def open_one(directory: Path, load_format: str) -> TensorSource:
    engine = EngineConfig(str(directory), load_format=load_format)
    return open_checkpoint(engine, read_model_config(engine))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_rows_are_those_of_the_whole(load_format, is_fp8, tmp_path):
    """Read ahead or not; fp8 ones with their scales, and no byte more."""
    sizes: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128, "qk_nope_head_dim": 56}
    tiny.save(tiny.make_model("v3", **sizes), tmp_path)
    if is_fp8:
        tiny.quantize_checkpoint(tmp_path)
    whole, itemsize = open_one(tmp_path, load_format), 4 if load_format == "auto" else 2
    for ahead in (False, True):
        part = open_one(tmp_path, load_format)
        for name, rows in KEPT.items():
            part.keep_rows(name, rows)
        if ahead:
            names = [name for name in part.tensors if PREFIX in name]
            part.read_ahead(names)
        for name, rows in KEPT.items():
            before = part.num_bytes_read
            expected, read = whole.read_weight(name), part.read_weight(name)
            data = expected.data[rows.start : rows.stop]
            assert torch.equal(read.data.float(), data.float()) and read.data.is_contiguous()
            assert (read.scale is None) == (expected.scale is None)
            if read.scale is not None and expected.scale is not None:
                assert torch.equal(read.scale, expected.scale[rows.start // 128 : -(-rows.stop // 128)])
            scales = 0 if read.scale is None else read.scale.nbytes
            assert part.num_bytes_read - before == scales + read.data.numel() * (1 if is_fp8 else itemsize), name
        part.close()
    whole.close()
    assert isinstance(whole, Checkpoint) == (load_format == "auto")
