"""LoadRecorder: which experts this rank's tokens choose, counted per step, and a sample of the choices themselves.

Counts are of logical experts at the rank that routes, so they mean the same under every placement. There is no padding
in a batch here, and masked choices (-1) are not counted.
"""

import numpy as np
import torch
from torch import Tensor

PHASES = ("prefill", "decode")
_SAMPLE_EVERY = 8  # steps
_SAMPLE_TOKENS = 64  # of such a step


class LoadRecorder:
    """L MoE layers, E logical experts, K choices per token, A tokens of the sample.

    tokens_PLE: int64 [2, L, E], choices since the start, prefill and decode apart. The sample holds the latest A tokens
    looked at, the same ones in every layer, in a ring: memory does not grow.
    """

    def __init__(self, num_layers: int, num_experts: int, top_k: int, sample_size: int = 4096):
        self.tokens_PLE = np.zeros((2, num_layers, num_experts), dtype=np.int64)
        dtype = np.uint8 if num_experts <= 256 else np.uint16
        self._sample_LAK = np.zeros((num_layers, sample_size, top_k), dtype=dtype)
        self._num_steps = self._num_sampled = 0
        self._num_decode = 0
        self._rows = self._places = np.empty(0, dtype=np.int64)

    def begin(self, num_tokens: int, num_decode: int) -> None:
        """A step of num_tokens tokens, of which the first num_decode are decodes, through all layers; an MTP layer sees
        the same tokens once more."""
        self._num_decode = num_decode
        self._num_steps += 1
        size = self._sample_LAK.shape[1]
        count = min(num_tokens, _SAMPLE_TOKENS, size) if self._num_steps % _SAMPLE_EVERY == 1 else 0
        self._rows = np.arange(count) * num_tokens // max(count, 1)
        self._places = (self._num_sampled + np.arange(count)) % size
        self._num_sampled += count

    def begin_drafts(self, num_tokens: int) -> None:
        """Tokens that the step only guesses: an MTP layer alone sees them. Counted as decodes, not sampled."""
        self._num_decode = num_tokens
        self._rows = self._places = np.empty(0, dtype=np.int64)

    def record(self, layer: int, expert_idx_TK: Tensor) -> None:
        """layer: row of the counts. expert_idx_TK: the choices of the step's tokens."""
        expert_TK = expert_idx_TK.cpu().numpy()
        for phase, part in enumerate((expert_TK[self._num_decode :], expert_TK[: self._num_decode])):
            if len(part):
                # One bin more, for the masked.
                self.tokens_PLE[phase, layer] += np.bincount(
                    part.reshape(-1) + 1, minlength=self.tokens_PLE.shape[2] + 1
                )[1:]
        if len(self._rows):
            self._sample_LAK[layer, self._places] = expert_TK[self._rows]

    def count(self) -> None:
        """To be called when the step has been computed. (Here record() has counted already.)"""

    def count_drafts(self, num_tokens: int) -> None:
        """To be called when the MTP layer has computed num_tokens tokens. (Here record() has counted already.)"""

    def sample(self) -> np.ndarray:
        """[L, A, K] uint8 or uint16, the choices of the tokens sampled last, in no particular order."""
        return self._sample_LAK[:, : min(self._num_sampled, self._sample_LAK.shape[1])].copy()


class DeviceLoadRecorder(LoadRecorder):
    """The same where choices are on a GPU: they are kept there during the step and counted by count(), at its end.

    Nothing waits for the GPU before that, and record() may be captured in a CUDA graph. The last num_draft_layers rows
    are MTP layers', which compute after that and more than once; count_drafts() counts them.
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
        self._chosen_LTK = torch.full((num_layers, max_tokens, top_k), -1, dtype=torch.int32, device=device)
        self._num_tokens = 0

    def begin(self, num_tokens: int, num_decode: int) -> None:
        super().begin(num_tokens, num_decode)
        self._num_tokens = num_tokens

    def record(self, layer: int, expert_idx_TK: Tensor) -> None:
        self._chosen_LTK[layer, : expert_idx_TK.shape[0]] = expert_idx_TK

    def count(self) -> None:
        for layer, chosen_TK in enumerate(self._chosen_LTK[: self._num_main_layers, : self._num_tokens].cpu()):
            super().record(layer, chosen_TK)

    def count_drafts(self, num_tokens: int) -> None:
        for layer, chosen_TK in enumerate(self._chosen_LTK[self._num_main_layers :, :num_tokens].cpu()):
            super().record(self._num_main_layers + layer, chosen_TK)
