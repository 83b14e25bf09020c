"""What every rank does in test_lines.py: fills another rank's lines while that rank looks at them."""

import torch

from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.structs import struct
from eprt.gpu.device import this_arch
from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch
from eprt.gpu.symmetric import SymmetricMemory

ProbeParams = struct("ProbeParams", "pointer to mine found", "int32 rounds unused")
THREADS, PAIRS, WARP_BYTES = 512, 8, 512


def no_torn_lines(group: EPGroup, rounds: int) -> None:
    """Each rank fills the next one's lines: few, so that they change all the time, and many, so that links are full."""
    kernel = Kernel(KernelSource("line_probe", this_arch()), "eprt::line_probe::probe", THREADS)
    found = torch.zeros(2, dtype=torch.int64, device="cuda")
    for num_blocks in (1, 4, 64):
        memory = SymmetricMemory(group, num_blocks * PAIRS * WARP_BYTES)
        memory.view(0, (memory.num_bytes,), torch.uint8).zero_()
        torch.cuda.synchronize()
        group.barrier()
        peers = memory.peer_ptr
        params = ProbeParams(peers[(group.rank + 1) % group.size], peers[group.rank], found.data_ptr(), rounds, 0)
        Launch(kernel, params)(num_blocks, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        group.barrier()
        memory.close()
    torn, numbers = found.tolist()
    print(f"[rank {group.rank}] {numbers} lines seen by lanes, {torn} torn")
    assert torn == 0 and numbers > 3 * PAIRS
    kernel.close()
