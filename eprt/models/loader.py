"""From a Hugging Face directory to a model on this rank: which builder reads which model_type."""

from pathlib import Path

from eprt.config import EngineConfig
from eprt.ep.group.agreement import all_or_none
from eprt.ep.group.group import EPGroup
from eprt.gpu.device import take_device
from eprt.models.config_file import ConfigFile
from eprt.models.deepseek_builder import Progress, load_deepseek
from eprt.models.deepseek_v4_builder import load_deepseek_v4
from eprt.models.model import Model
from eprt.models.model_types import take_model_type

# model_type of config.json -> its loader; all have the signature of load_deepseek.
_LOADERS = {
    "deepseek_v2": load_deepseek,
    "deepseek_v3": load_deepseek,
    "deepseek_v32": load_deepseek,
    "deepseek_v4": load_deepseek_v4,
}


def load_model(engine: EngineConfig, group: EPGroup, progress: Progress | None = None) -> Model:
    """The model of engine.model_dir. Collective: when one rank fails, all raise, naming it. progress(bytes_read,
    bytes_to_read) is called after each tensor; the bytes are this rank's."""
    with all_or_none(group, "load the model"):
        model_type = take_model_type(ConfigFile(Path(engine.model_dir) / "config.json"))
    device = take_device(engine.device, group)
    return _LOADERS[model_type](engine, group, progress, device)
