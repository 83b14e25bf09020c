"""LoadRecorder: which experts this rank's tokens choose, counted per step, and a sample of the choices themselves.

Counts are of logical experts at the rank that routes, so they mean the same under every placement. Padding is masked,
and masked choices (-1) are not counted.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eprt import ops
from eprt.gpu.readback import HostSnapshot, Readback

_SAMPLE_EVERY = 8  # steps
_SAMPLE_TOKENS = 64  # of such a step


class LoadRecorder:
    """L MoE layers, E logical experts, K choices per token, A tokens of the sample.

    In a step: begin(), record() by each layer, end() when all has been launched; then, for each pass of an MTP layer
    beyond the first, begin_drafts(), record(), and count_drafts() after every pass. The sample holds the latest A
    tokens looked at, the same ones in every layer, in a ring: memory does not grow. Choices are counted once a step,
    those of all layers together: one by one that would cost each layer of a decode more than its arithmetic.
    """

    def __init__(self, num_layers: int, num_experts: int, top_k: int, sample_size: int = 4096):
        self._tokens_PLE = np.zeros((2, num_layers, num_experts), dtype=np.int64)
        dtype = np.int8 if num_experts <= 128 else np.int16  # -1: masked
        self._sample_LAK = np.zeros((num_layers, sample_size, top_k), dtype=dtype)
        self._step_A = np.zeros(sample_size, dtype=np.int64)
        self._num_steps = self._num_sampled = 0
        self._num_decode = 0
        self._uncounted: list[tuple[int, np.ndarray]] = []  # of each part: the number of its first bin, and its choices
        self._rows = self._places = np.empty(0, dtype=np.int64)

    @property
    def tokens_PLE(self) -> np.ndarray:
        """int64 [2, L, E], choices since the start, prefill and decode apart."""
        self._count()
        return self._tokens_PLE

    def begin(self, num_tokens: int, num_decode: int) -> None:
        """A step of num_tokens tokens, of which the first num_decode are decodes, through all layers; an MTP layer sees
        the same tokens once more."""
        self._num_decode = num_decode
        self._num_steps += 1
        size = self._sample_LAK.shape[1]
        count = min(num_tokens, _SAMPLE_TOKENS, size) if self._num_steps % _SAMPLE_EVERY == 1 else 0
        self._rows = np.arange(count) * (num_tokens // max(count, 1))
        self._places = (self._num_sampled + np.arange(count)) % size
        self._step_A[self._places] = self._num_steps
        self._num_sampled += count

    def begin_drafts(self, num_tokens: int) -> None:
        """Tokens that the step only guesses: an MTP layer alone sees them. Counted as decodes, not sampled."""
        self._num_decode = num_tokens
        self._rows = self._places = np.empty(0, dtype=np.int64)

    def record(self, layer: int, expert_idx_TK: Tensor, first: int = 0) -> None:
        """layer: row of the counts. expert_idx_TK: the choices of the step's tokens from the first-th on, as a step may
        come in parts."""
        expert_TK = expert_idx_TK.cpu().numpy()
        num_decode = max(0, self._num_decode - first)
        _, num_layers, num_experts = self._tokens_PLE.shape
        for phase, part in enumerate((expert_TK[num_decode:], expert_TK[:num_decode])):
            if len(part):
                self._uncounted.append(((phase * num_layers + layer) * (num_experts + 1), part))
        if len(self._rows):
            here = (self._rows >= first) & (self._rows < first + len(expert_TK))
            self._sample_LAK[layer, self._places[here]] = expert_TK[self._rows[here] - first]

    def _count(self) -> None:
        """What record() was given since the last call."""
        if not self._uncounted:
            return
        num_phases, num_layers, num_experts = self._tokens_PLE.shape
        # One bin more per row, the first, for the masked.
        bins = np.concatenate([part.reshape(-1) + (first_bin + 1) for first_bin, part in self._uncounted])
        counts = np.bincount(bins, minlength=num_phases * num_layers * (num_experts + 1))
        self._tokens_PLE += counts.reshape(num_phases, num_layers, num_experts + 1)[:, :, 1:]
        self._uncounted = []

    def end(self) -> None:
        """The step has been launched."""
        self._count()

    def count_drafts(self, num_tokens: int) -> None:
        """A pass of the MTP layer over num_tokens tokens has been launched."""

    def sample(self) -> np.ndarray:
        """[L, A, K] int8 or int16, the choices of the tokens sampled last, in no particular order; -1: masked."""
        return self._sample_LAK[:, : min(self._num_sampled, self._sample_LAK.shape[1])].copy()

    def sample_steps(self) -> np.ndarray:
        """int64 [A]: the step in which each of them was computed; the first is 1."""
        return self._step_A[: min(self._num_sampled, len(self._step_A))].copy()


class _Sampled(NamedTuple):
    """Choices on their way to the host."""

    layers: slice  # rows of the sample
    places: np.ndarray  # int64: of its tokens in the sample
    snapshot: HostSnapshot


class DeviceLoadRecorder(LoadRecorder):
    """The same where choices are on a GPU: counted there, by the step itself, also by one replayed from a CUDA graph
    (which holds decodes alone, and padding that is masked).

    The host waits for nothing: tokens_PLE is as recent as Readback says. What is recorded before the first begin(),
    kernels being compiled and graphs recorded, does not count. The last num_draft_layers rows are MTP layers', which
    compute after the others and more than once.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        max_tokens: int,
        device: torch.device,
        num_draft_layers: int = 0,
    ):
        super().__init__(num_layers, num_experts, top_k)
        self._num_main_layers = num_layers - num_draft_layers
        self._counted_PLE = torch.zeros(2, num_layers, num_experts, dtype=torch.int64, device=device)
        self._kept_LTK = torch.full((num_layers, max_tokens, top_k), -1, dtype=torch.int32, device=device)
        self._readback = Readback([self._counted_PLE])
        self._sampled: list[_Sampled] = []

    @property
    def tokens_PLE(self) -> np.ndarray:
        # Before the first step the device has the warm-up's: shown once, they would have to be taken back.
        return self._readback.read()[0] if self._num_steps else self._tokens_PLE.copy()

    def begin(self, num_tokens: int, num_decode: int) -> None:
        if self._num_steps == 0:
            self._counted_PLE.zero_()
        super().begin(num_tokens, num_decode)

    def record(self, layer: int, expert_idx_TK: Tensor, first: int = 0) -> None:
        num_tokens = expert_idx_TK.shape[0]
        recording = expert_idx_TK.is_cuda and torch.cuda.is_current_stream_capturing()
        num_decode = num_tokens if recording else min(max(0, self._num_decode - first), num_tokens)
        kept_TK = self._kept_LTK[layer, first : first + num_tokens]
        if kept_TK.shape[0] < num_tokens:  # a kernel would write past the end
            most = self._kept_LTK.shape[1]
            raise ValueError(f"a step of {first + num_tokens} tokens: this recorder was made for at most {most}")
        ops.count_choices(expert_idx_TK, self._counted_PLE[:, layer], kept_TK, num_decode)

    def end(self) -> None:
        self._send_sample(slice(0, self._num_main_layers))

    def count_drafts(self, num_tokens: int) -> None:
        self._send_sample(slice(self._num_main_layers, None))

    def sample(self) -> np.ndarray:
        self._take_in(wait=True)
        return super().sample()

    def _send_sample(self, layers: slice) -> None:
        """Before the next pass writes there; in the order of the stream, which it follows."""
        self._take_in(wait=False)
        if len(self._rows):
            step = int(self._rows[1]) if len(self._rows) > 1 else 1
            kept_LAK = self._kept_LTK[layers, : len(self._rows) * step : step]
            self._sampled.append(_Sampled(layers, self._places, HostSnapshot([kept_LAK])))

    def _take_in(self, *, wait: bool) -> None:
        while self._sampled and (wait or self._sampled[0].snapshot.has_arrived):
            layers, places, snapshot = self._sampled.pop(0)
            self._sample_LAK[layers, places] = snapshot.values()[0]
