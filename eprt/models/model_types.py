"""Which models and which quantisations of a config.json are served, and what to say of the others.

Loads no torch, so that a server refuses at once. Knows nothing of what the models are.
"""

from eprt.models.config_file import ConfigFile, shown

SERVED = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4")
# Models of the same family that are not served yet, and what to serve instead.
_NOT_YET = {
    "deepseek_v41": "DeepSeek V4.1's Engram is not implemented; DeepSeek-V4 is served",
}
_OTHER_FORMATS = "use the fp8 or bf16 release of the model (--quantization int8 makes 8-bit weights of either)"


def take_model_type(file: ConfigFile) -> str:
    """ValueError, before anything else in the file is read, for a model that is not served."""
    model_type = file.take("model_type", str)
    if model_type not in SERVED:
        why = _NOT_YET.get(model_type.replace("_1", "1"), f"supported: {', '.join(SERVED)}")
        raise ValueError(f"{file.path}: model_type={shown(model_type)} is not supported; {why}")
    newer = next((name for name in file.fields if "engram" in name.lower()), None)
    if model_type == "deepseek_v4" and newer is not None:
        raise ValueError(f"{file.path}: {newer} is a field of DeepSeek V4.1. {_NOT_YET['deepseek_v41']}")
    return model_type


def take_quant_method(file: ConfigFile) -> str | None:
    """ "fp8" or None; ValueError for any other."""
    if file.fields.get("quantization_config") is None:
        _refuse_modelopt(file)
        return None
    section = file.section("quantization_config")
    method = section.take("quant_method", str)
    if method != "fp8":
        raise ValueError(f"{section.where}: quant_method={method!r} is not supported, only 'fp8'; {_OTHER_FORMATS}")
    section.only("fmt", "e4m3")
    section.only("activation_scheme", "dynamic")
    section.take("weight_block_size", list)  # must be there
    section.only("weight_block_size", [128, 128])
    return "fp8"


def _refuse_modelopt(file: ConfigFile) -> None:
    """NVIDIA's quantised checkpoints may say nothing in config.json."""
    path = file.path.with_name("hf_quant_config.json")
    if path.exists():
        name = ConfigFile(path).section("quantization").take("quant_algo", str, "unknown")
        raise ValueError(f"{path}: quant_algo={name!r} is not supported; {_OTHER_FORMATS}")
