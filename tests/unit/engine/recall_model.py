"""RecallModel: a model whose next token is a hash of the whole context as read back from the KV pages.

It has no weights, but it caches and attends like one: every token's entry (its id and its position) is inserted at its
kv_slot before any request reads its pages. One wrong page, slot, position or length anywhere changes the tokens,
exactly and visibly, which rounding in a real model would blur. context_logits() is its oracle, without pages.
"""

from types import SimpleNamespace

import numpy as np
import torch

from tests.dense_model import DenseModel

VOCAB = 97


def _context_hash(token_ids: np.ndarray) -> np.ndarray:
    """uint64 [T]: for every prefix of token_ids, a number that depends on all its tokens and their order."""
    powers = np.cumprod(np.full(len(token_ids), 6364136223846793005, dtype=np.uint64), dtype=np.uint64)
    return np.cumsum((token_ids.astype(np.uint64) + np.uint64(11)) * powers, dtype=np.uint64)


def _logits(context_hash_X: np.ndarray) -> torch.Tensor:
    """fp32 [X, V], a different permutation-like landscape for every hash."""
    mixed = (context_hash_X[:, None] ^ (np.arange(VOCAB, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(
        0xBF58476D1CE4E5B9
    )
    return torch.from_numpy(((mixed >> np.uint64(40)).astype(np.float32) / 2**21).astype(np.float32))


class RecallModel(DenseModel):
    def __init__(self, max_position_embeddings: int = 4096, eos_token_ids: tuple[int, ...] = ()):
        self.config = SimpleNamespace(
            vocab_size=VOCAB,
            num_hidden_layers=1,
            kv_lora_rank=1,
            qk_rope_head_dim=1,
            indexer=None,
            v4=None,
            max_position_embeddings=max_position_embeddings,
            eos_token_ids=eos_token_ids,
        )
        self.modes: list[str] = []
        self.num_tokens: list[int] = []

    def forward(self, batch, cache_L) -> torch.Tensor:
        self.modes.append(batch.mode)
        self.num_tokens.append(batch.num_tokens)
        assert batch.num_context == batch.seq_len_B[batch.num_decode :].sum(), "contexts of the prompts"
        pages = cache_L[0].latents
        entries = pages.view(-1, 2)
        assert len(set(batch.kv_slot_T.tolist())) == batch.num_tokens, "two tokens share a cache slot"
        entries[batch.kv_slot_T] = torch.stack([batch.token_id_T, batch.position_T], dim=1).float()
        page_size = cache_L[0].page_size
        assert batch.query_start_B1.dtype == batch.seq_len_B.dtype == batch.page_table_BP.dtype == torch.int32
        hashes = [np.empty(0, dtype=np.uint64)]
        for b, seq_len in enumerate(batch.seq_len_B.tolist()):
            begin, end = batch.query_start_B1[b : b + 2].tolist()
            assert (end - begin == 1) or b >= batch.num_decode
            its_pages = batch.page_table_BP[b, : -(-seq_len // page_size)].long()
            context = pages[its_pages].flatten(0, 1)[:seq_len].long().numpy()
            assert (context[:, 1] == np.arange(seq_len)).all(), f"request {b} reads positions {context[:, 1]}"
            hashes.append(_context_hash(context[:, 0])[seq_len - (end - begin) :])
        assert sum(map(len, hashes)) == batch.num_tokens
        return _logits(np.concatenate(hashes)[batch.logits_idx.numpy()])

    def expert_load(self) -> list[list[int]]:
        return [[0]]


def context_logits(token_ids: list[int]) -> torch.Tensor:
    """fp32 [T, V]: the logits after every token."""
    return _logits(_context_hash(np.array(token_ids)))
