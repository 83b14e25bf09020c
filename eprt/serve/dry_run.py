"""`eprt serve --dry-run`: what each rank's weights, cache and buffers would take, and what there is. Starts nothing."""

import torch

from eprt.engine.memory_plan import MemoryPlan, gpu_share
from eprt.serve.options import OptionError, ServeOptions


def run(options: ServeOptions) -> int:
    """0 where it fits; 1 where it does not or that cannot be known. OptionError for what cannot be served."""
    if not options.num_instances:
        return _tell(options, options.total_ranks, options.model_name)
    plan = {role: num_ranks for _, role, num_ranks in options.instance_plan}
    statuses = [_tell(options, num, f"{options.model_name}, {role} instances") for role, num in plan.items()]
    return max(statuses)


def _tell(options: ServeOptions, num_ranks: int, who: str) -> int:
    """Of one group of ranks, or of each instance of a role."""
    engine, on_host = options.engine, options.num_ranks or 1
    gpus = torch.cuda.device_count() if engine.device != "cpu" and torch.cuda.is_available() else 0
    device = "cuda" if engine.device == "cuda" or gpus >= num_ranks else "cpu"
    gpu_bytes = gpu_share(num_ranks) if device == "cuda" else None
    try:
        plan = MemoryPlan.for_rank(engine, num_ranks, device=device, gpu_bytes=gpu_bytes, ranks_on_host=on_host)
    except (ValueError, OSError) as error:
        raise OptionError(str(error)) from None
    ranks = "1 rank" if num_ranks == 1 else f"each of {num_ranks} ranks"
    print(f"{who}, memory of {ranks} on {'a GPU' if device == 'cuda' else 'this host'}:")
    print(plan.table())
    return 0 if plan.share is not None and plan.fits else 1
