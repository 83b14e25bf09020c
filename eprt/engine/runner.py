"""From a schedule to logits: packs the step's tokens into a ForwardBatch and calls the model.

The batch's tensors are views of buffers that are filled again in the next step; the model keeps none of them.
"""

import numpy as np
import torch
from torch import Tensor

from eprt.engine.batch_rows import BatchRows
from eprt.engine.request import Request
from eprt.engine.sampler import top_logprobs
from eprt.engine.scheduler import Chunk, Schedule
from eprt.layers.batch import ForwardBatch

# Rows of prompt log-probabilities computed at once: bounds the memory beside the logits themselves.
_LOGPROB_ROWS = 64


class Runner:
    """model: see models/registry.py. kv_cache_LPSD: [layers, pages, page_size, kv_dim]."""

    def __init__(self, model, kv_cache_LPSD: Tensor, rows: BatchRows, chunk_size: int, max_running: int):
        self.model, self.kv_cache_LPSD, self.rows = model, kv_cache_LPSD, rows
        self.device = kv_cache_LPSD.device
        self.page_size = kv_cache_LPSD.shape[2]
        self.token_id_T = np.zeros(chunk_size, dtype=np.int64)
        self.position_T = np.zeros(chunk_size, dtype=np.int64)
        self.kv_slot_T = np.zeros(chunk_size, dtype=np.int64)
        self.logits_idx_T = np.arange(chunk_size, dtype=np.int64)
        self.query_start_B1 = np.arange(max_running + 1, dtype=np.int32)

    def run(self, schedule: Schedule, mode: str) -> Tensor:
        """logits [X, V] fp32: first one row per schedule.sampled, then the rows that prompt_logprobs() takes."""
        return self.model.forward(self.pack(schedule, mode), self.kv_cache_LPSD)

    def pack(self, schedule: Schedule, mode: str) -> ForwardBatch:
        """The step's tokens as tensors."""
        decodes, chunks = schedule.decodes, schedule.chunks
        row_B = [request.row for request in decodes]
        seq_len_B = [request.num_computed + 1 for request in decodes]
        self._pack_decodes(decodes, row_B)
        num_tokens = len(decodes)
        query_start_B1 = self.query_start_B1
        if chunks:
            query_start_B1 = query_start_B1[: num_tokens + 1].tolist()
            for chunk in chunks:
                num_tokens = self._pack_chunk(chunk, num_tokens)
                row_B.append(chunk.request.row)
                seq_len_B.append(chunk.end)
                query_start_B1.append(num_tokens)
        num_pages = -(-max(seq_len_B, default=0) // self.page_size)
        return ForwardBatch(
            token_id_T=self._tensor(self.token_id_T[:num_tokens]),
            position_T=self._tensor(self.position_T[:num_tokens]),
            kv_slot_T=self._tensor(self.kv_slot_T[:num_tokens]),
            page_table_BP=self._tensor(self.rows.page_table_MP[row_B, :num_pages]),
            seq_len_B=self._tensor(np.array(seq_len_B, dtype=np.int32)),
            query_start_B1=self._tensor(np.asarray(query_start_B1[: len(row_B) + 1], dtype=np.int32)),
            num_decode=len(decodes),
            logits_idx=self._tensor(self._logits_idx(schedule)),
            mode=mode,
        )

    def prompt_logprobs(self, schedule: Schedule, logits_XV: Tensor) -> list[list]:
        """Per chunk: (logprob, top pairs) of the prompt tokens that follow its tokens, for requests that want them."""
        result: list[list] = []
        start = len(schedule.sampled)
        for chunk in schedule.chunks:
            count = _num_prompt_logprobs(chunk)
            result.append(_score_prompt(logits_XV[start : start + count], chunk))
            start += count
        return result

    def _pack_decodes(self, decodes: list[Request], row_B: list[int]) -> None:
        num = len(decodes)
        self.token_id_T[:num] = [request.tokens[-1] for request in decodes]
        position_T = self.position_T[:num]
        position_T[:] = [request.num_computed for request in decodes]
        page_T, offset_T = np.divmod(position_T, self.page_size)
        self.kv_slot_T[:num] = self.rows.page_table_MP[row_B, page_T] * np.int64(self.page_size) + offset_T

    def _pack_chunk(self, chunk: Chunk, at: int) -> int:
        end = at + chunk.end - chunk.start
        self.token_id_T[at:end] = chunk.request.tokens[chunk.start : chunk.end]
        position_T = self.position_T[at:end]
        position_T[:] = np.arange(chunk.start, chunk.end)
        page_T, offset_T = np.divmod(position_T, self.page_size)
        self.kv_slot_T[at:end] = (
            self.rows.page_table_MP[chunk.request.row, page_T] * np.int64(self.page_size) + offset_T
        )
        return end

    def _logits_idx(self, schedule: Schedule) -> np.ndarray:
        num_decode = len(schedule.decodes)
        if not schedule.chunks:
            return self.logits_idx_T[:num_decode]
        sampled, scored = [self.logits_idx_T[:num_decode]], []
        start = num_decode
        for chunk in schedule.chunks:
            end = start + chunk.end - chunk.start
            if chunk.is_last:
                sampled.append(self.logits_idx_T[end - 1 : end])
            scored.append(self.logits_idx_T[start : start + _num_prompt_logprobs(chunk)])
            start = end
        return np.concatenate(sampled + scored)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _num_prompt_logprobs(chunk: Chunk) -> int:
    """How many tokens of the chunk, counted from its first, precede a prompt token whose logprob is wanted."""
    request = chunk.request
    if request.prompt_logprobs is None:
        return 0
    return max(0, min(chunk.end, request.num_prompt - 1) - chunk.start)


def _score_prompt(logits_RV: Tensor, chunk: Chunk) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    request = chunk.request
    scores: list[tuple[float, tuple[tuple[int, float], ...]]] = []
    for at in range(0, logits_RV.shape[0], _LOGPROB_ROWS):
        logprob_RV = logits_RV[at : at + _LOGPROB_ROWS].log_softmax(dim=-1)
        first = chunk.start + at + 1
        target = request.tokens[first : first + logprob_RV.shape[0]]
        target_R1 = torch.tensor(target, device=logprob_RV.device).unsqueeze(1)
        values = logprob_RV.gather(1, target_R1).squeeze(1).tolist()
        scores += zip(values, top_logprobs(logprob_RV, request.params.logprobs or 0))
    # A request that was preempted computes some positions again.
    return scores[len(request.prompt_logprobs or ()) - chunk.start :]
