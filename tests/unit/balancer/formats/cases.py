"""Load files as other programs write them."""

import json

import numpy as np
import torch
from safetensors.numpy import save_file

SLOTS = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 3]]
PASS = {"forward_pass_id": 0, "rank": 0, "global_physical_count": torch.ones(2, 6, dtype=torch.int32)}


def server(load, server_id="a"):
    return {"schema": "eprt.load/1", "server_id": server_id, "layers": [{"per_expert": row} for row in load]}


def stat_dump(path, count):
    torch.save({"rank": 0, "logical_count": torch.tensor(count), "average_utilization_rate_over_window": None}, path)


def tensorrt_dump(folder, ranks=2, num_experts=4, iterations=(5, 6), layers=(3, 4)):
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": num_experts, "num_experts_per_token": 2}))
    counts = rng.integers(0, 9, size=(ranks, len(iterations), len(layers), num_experts))
    for rank in range(ranks):
        tensors = {
            f"{i}_{layer}": counts[rank, a, b] for a, i in enumerate(iterations) for b, layer in enumerate(layers)
        }
        save_file(tensors, folder / f"rank{rank}.safetensors")
    return counts
