"""DeepSeek's EPLB, one Python file that is not part of this repository: loads it and compares its maps with ours."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
from eprt.balancer import Placement, plan, rebalance_experts


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("deepseek_eplb", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parity(eplb: ModuleType, load_LE: np.ndarray, options: dict[str, int]) -> dict[str, float | bool]:
    """GPU loads against EPLB as it is, maps against EPLB with its sorts made stable."""
    import torch  # only EPLB needs it

    def stable_sort(self, dim: int = -1, descending: bool = False):
        return sort(self, dim=dim, descending=descending, stable=True)

    sort = torch.Tensor.sort
    shape = tuple(options[n] for n in ("num_slots", "num_groups", "num_nodes", "num_gpus"))
    load_LE = load_LE.astype(np.float32)
    weight = torch.from_numpy(load_LE)
    ours = rebalance_experts(load_LE, *shape)
    theirs = [array.numpy() for array in eplb.rebalance_experts(weight, *shape)]
    torch.Tensor.sort = stable_sort  # type: ignore[assignment]
    try:
        stable = [array.numpy() for array in eplb.rebalance_experts(weight, *shape)]
    finally:
        torch.Tensor.sort = sort  # type: ignore[assignment]
    even = plan(load_LE, **options, shares="even").gpu_load(load_LE).max(1)
    largest = [_largest_loads(one[0], load_LE, options) for one in (ours, theirs)]
    return {
        "largest_load_difference": float(np.abs(largest[0] / largest[1] - 1).max()),
        "slots_equal_to_stable_eplb": float((ours[0] == stable[0]).mean()),
        "slots_equal_to_eplb": float((ours[0] == theirs[0]).mean()),
        "counts_equal": bool((ours[2] == theirs[2]).all()),
        "layers_even_above_eplb": sum(
            int((even > _largest_loads(maps[0], load_LE, options) * (1 + 1e-7)).sum()) for maps in (theirs, stable)
        ),
    }


def _largest_loads(slots_LP: np.ndarray, load_LE: np.ndarray, options: dict[str, int]) -> np.ndarray:
    return Placement(slots_LP, options["num_gpus"], options["num_nodes"]).gpu_load(load_LE).max(1)
