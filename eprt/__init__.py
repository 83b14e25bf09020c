"""eprt: expert-parallel communication and load balancing for serving DeepSeek-style MoE models.

    from eprt import LLM, SamplingParams        # offline generation, on any number of ranks
    from eprt import EPGroup, EPMoE, MoEConfig  # expert parallelism inside someone else's model

Names are imported on first use, so that `eprt.balancer` and `eprt.diagnostics` never load torch.
"""

from importlib import import_module

__version__ = "0.1.0"

_EXPORTS = {
    "EPGroup": "eprt.ep.group",
    "EPMoE": "eprt.layers.moe",
    "MoEConfig": "eprt.config",
    "ModelConfig": "eprt.config",
    "EngineConfig": "eprt.config",
    "ParallelConfig": "eprt.config",
    "LLM": "eprt.engine.llm",
    "SamplingParams": "eprt.engine.sampling_params",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'eprt' has no attribute {name!r}; it has {', '.join(sorted(_EXPORTS))}")
    return getattr(import_module(_EXPORTS[name]), name)
