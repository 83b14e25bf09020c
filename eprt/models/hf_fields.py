"""Fields of config.json that all models have."""

import torch

from eprt.config import EngineConfig
from eprt.models.config_file import ConfigFile, shown

# float16 checkpoints compute in float32, which holds their values exactly; bfloat16 would round them.
_COMPUTE_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float32}


def take_num_layers(file: ConfigFile, engine: EngineConfig) -> int:
    num_layers, wanted = file.size("num_hidden_layers"), engine.num_hidden_layers
    if wanted is not None and wanted > num_layers:
        raise ValueError(
            f"--num-hidden-layers {wanted}: {file.path} has {num_layers} layers; must be in 1..{num_layers}"
        )
    return wanted or num_layers


def take_dtype(file: ConfigFile, requested: str) -> torch.dtype:
    """ "auto" without a dtype in the file is float32: exact, whatever the tensors are."""
    if requested != "auto":
        return _COMPUTE_DTYPE[requested]
    name = file.take("dtype", str, None) or file.take("torch_dtype", str, "float32")
    if name not in _COMPUTE_DTYPE:
        raise ValueError(f"{file.path}: dtype={shown(name)} is not supported; give --dtype float32 or bfloat16")
    return _COMPUTE_DTYPE[name]


def take_eos_token_ids(file: ConfigFile, generation: ConfigFile | None) -> tuple[int, ...]:
    """Chat models often name the end of a turn only in generation_config.json."""
    ids: list[int] = []
    for each in filter(None, (file, generation)):
        value = each.take("eos_token_id", (int, list), [])
        value = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int for token_id in value):
            raise ValueError(f"{each.where}: eos_token_id={value!r}: must be token ids, which are integers")
        ids += value
    return tuple(dict.fromkeys(ids))
