"""DeviceMeeting: some ranks of a host wait for each other on their GPUs (csrc/cuda/meeting.cu).

As RankBarrier (ep/group/rank_barrier.py), but the host waits for nobody: it launches the wait, in the order of the
current stream. Knows nothing of why ranks meet.
"""

import ctypes
import threading
from collections.abc import Sequence

import torch

from eprt import env
from eprt.ep.errors import EPError
from eprt.ep.group.current_wait import CurrentWait
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.failure import CallContext, take_failure
from eprt.ep.nvlink.rank_mask import RankMask
from eprt.ep.nvlink.structs import Deadline, deadline_ns, struct
from eprt.ep.nvlink.waiting import KernelWait
from eprt.gpu.device import this_arch
from eprt.gpu.elastic_memory import ElasticMemory
from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch
from eprt.gpu.symmetric import HostWords, SymmetricMemory

MAX_RANKS = 32
_THREADS = 32  # kWarp
_PERIOD = 0xFFFFFFFE  # even, so that the parity of epochs alternates also where they begin anew


def meet_struct(num_ranks: int) -> type[ctypes.Structure]:
    addresses = ("peer", ctypes.c_uint64 * num_ranks)
    return struct("MeetParams", addresses, ("deadline", Deadline), "uint32 team epoch", "int32 rank")


def source(num_ranks: int, arch: str = "sm_90a") -> KernelSource:
    return KernelSource("meeting", arch, (("NUM_RANKS", num_ranks),))


class DeviceMeeting:
    """Construction and close() are collective over the group, whose ranks are of one host; each rank has one meeting.

    A wait past its deadline masks the rank that is missing, so that no later one waits for it, and check() raises.

    ranks: that wait for each other, this one among them; those that take no part in the view are not waited for.
    timeout_s: deadline of every wait; default EPRT_GPU_TIMEOUT_S.
    """

    def __init__(self, group: EPGroup, ranks: Sequence[int], timeout_s: float | None = None):
        if group.size > MAX_RANKS:
            raise ValueError(f"[rank {group.rank}/{group.size}] at most {MAX_RANKS} ranks can meet on their GPUs")
        self._group = group
        waits_s: float = env.get("EPRT_GPU_TIMEOUT_S") if timeout_s is None else timeout_s
        memory_type = SymmetricMemory if group.fd_desk() is None else ElasticMemory
        self._memory = memory_type(group, 2 * 4 * group.size)
        self._mask = RankMask(group.size)
        self._failure, self._waiting = HostWords(4), HostWords(2)
        self._kernel_wait = KernelWait(self._waiting.words)
        self._context = CallContext(group, waits_s, 1, 1, deadline="EPRT_GPU_TIMEOUT_S")
        self._kernel = Kernel(source(group.size, this_arch()), "eprt::meet", _THREADS)
        words = self._mask.told.device_ptr, self._failure.device_ptr, self._waiting.device_ptr
        deadline = Deadline(deadline_ns(waits_s), self._mask.on_gpu.data_ptr(), *words)
        team = sum(1 << rank for rank in ranks)
        params = {"peer": tuple(self._memory.peer_ptr), "deadline": deadline, "team": team, "rank": group.rank}
        self._launch = Launch(self._kernel, meet_struct(group.size)(**params))
        self._device = torch.cuda.current_device()
        self._epoch = 0
        self._alive = group.view.alive
        self._halted: EPError | None = None  # what check() raises until restart()
        self._halting = threading.Lock()
        self._is_closed = False
        self._mask.write([not each for each in self._alive])
        torch.cuda.synchronize()
        group.barrier()

    @property
    def epoch(self) -> int:
        """Of the latest meeting. Waits until it is over."""
        torch.cuda.synchronize()
        return self._epoch

    def wait(self) -> None:
        """Launches a wait until all of the ranks have launched as many. What each launched before is done for all that
        is launched behind it.

        Raises what check() raises.
        """
        self.check()
        self._epoch += 1
        self._launch.params.epoch = self._epoch % _PERIOD + 1
        self._launch(1, torch._C._cuda_getCurrentRawStream(self._device))

    def check(self) -> None:
        """Raises what halt() was given, or what a wait has reported by now, that once. Does not wait for the GPU."""
        if self._halted is not None:
            raise self._halted.with_traceback(None)
        words = self._failure.words
        if words[0] and (error := take_failure(words, self._context)):
            raise error

    def current_wait(self) -> CurrentWait | None:
        """That the GPU is in. From one thread, at most twice a second."""
        return None if self._is_closed else self._kernel_wait.look()

    def halt(self, error: EPError, view_number: int) -> None:
        """Ends all waits at once, until restart(). From any thread. Nothing where the view is another one by now."""
        with self._halting:
            if self._halted is None and view_number == self._group.view.number:
                self._halted = error
                self._mask.write([rank != self._group.rank for rank in range(self._group.size)])

    def restart(self, epoch: int) -> None:
        """From now on those of the ranks that take part in group.view wait; their next wait has this epoch, larger than
        any before. With nothing under way: waits for the GPU and, after halt(), for the end of lost processes, as long
        as which their kernels may write into this rank's memory."""
        torch.cuda.synchronize()
        alive = self._group.view.alive
        if self._halted is not None:
            self._group.wait_ended([rank for rank, was in enumerate(self._alive) if was and not alive[rank]])
        self._epoch = epoch - 1
        with self._halting:
            self._memory.remap(alive)
            self._mask.write([not each for each in alive])
            self._failure.words[0] = 0
            self._alive, self._halted = alive, None

    def close(self) -> None:
        """Collective while all ranks live; never hangs when some do not."""
        self._is_closed = True
        self._memory.close()
        for part in (self._failure, self._waiting, self._mask, self._kernel):
            part.close()
