"""The operators that count and place choices of experts: on a device as on the CPU, bit for bit."""

import numpy as np
import torch

from eprt.ep.placement.slot_map import SlotMap
from eprt.ops import cuda
from eprt.ops.checksum import WIDE_WORDS, add_checksum, word_bytes
from eprt.ops.choices import count_choices
from tests.gpu.draw import Draw


def random_slot_map(rng: np.random.Generator, num_experts: int, num_slots: int) -> SlotMap:
    """Replicas and empty slots anywhere, uneven weights, some of them 0."""
    rest = rng.integers(-1, num_experts, num_slots - num_experts)
    row_S = rng.permutation(np.concatenate([np.arange(num_experts), rest]))
    return SlotMap.from_row(row_S, num_experts, weight_S=rng.integers(0, 4, num_slots).astype(float))


def slots_of_choices(draw: Draw) -> None:
    """Batch after batch, of any size, with masked choices; a placement with fewer replicas than the table has room for;
    counts that no longer fit into 32 bits."""
    rng = np.random.default_rng(0)
    for num_experts, num_slots, top_k in ((1, 1, 1), (5, 5, 2), (5, 9, 3), (12, 40, 4), (32, 36, 8)):
        slot_map, width = random_slot_map(rng, num_experts, num_slots), num_slots - num_experts + 1
        slot_LX = torch.full((num_experts + 1, width), -1, dtype=torch.int64)
        bound_LX = torch.full((num_experts + 1, width), 1 << 32, dtype=torch.int64)
        used = slot_map.slot_LX.shape[1]
        slot_LX[:, :used], bound_LX[:, :used] = slot_map.slot_LX, slot_map.bound_LX
        start = (1 << 31) - 7 if num_experts == 12 else 0
        sent = np.full(num_experts + 1, start, dtype=np.int64)
        sent_L = torch.full((num_experts + 1,), start).to(draw.device)
        for num_tokens in (3, 0, 1, 40, 700):
            expert_TK = torch.from_numpy(rng.integers(-1, num_experts, (num_tokens, top_k)))
            want_TK = slot_map.slot_idx(expert_TK, sent)
            tables = slot_LX.to(draw.device), bound_LX.to(draw.device)
            got_TK = cuda.choose_slots(expert_TK.to(draw.device), *tables, sent_L).cpu()
            assert torch.equal(got_TK, want_TK), (num_experts, num_slots, num_tokens)
            if width > 1 and used > 1:
                assert sent_L.tolist() == sent.tolist()


def counts_of_choices(draw: Draw) -> None:
    for num_experts, top_k in ((1, 1), (7, 3), (32, 8)):
        tokens_PLE = torch.zeros(2, 3, num_experts, dtype=torch.int64)
        there_PLE = tokens_PLE.to(draw.device)
        for num_tokens, num_decode in ((0, 0), (1, 0), (5, 5), (90, 30)):
            expert_TK = draw.integers(-1, num_experts, num_tokens, top_k)
            kept_TK = torch.full((num_tokens + 2, top_k), 77, dtype=torch.int32).to(draw.device)
            count_choices(
                expert_TK.cpu(), tokens_PLE[:, 1], torch.empty(num_tokens, top_k, dtype=torch.int32), num_decode
            )
            cuda.count_choices(expert_TK, there_PLE[:, 1], kept_TK[:num_tokens], num_decode)
            assert torch.equal(kept_TK[:num_tokens].long(), expert_TK) and (kept_TK[num_tokens:] == 77).all()
        assert torch.equal(there_PLE.cpu(), tokens_PLE) and tokens_PLE[:, 1].sum() > 0


def checksums(draw: Draw) -> None:
    """Of any length and alignment; in pieces; and no byte can change, nor two change places, unnoticed."""
    memory = draw.integers(0, 256, 70_000).to(torch.uint8)
    for start, length in ((0, 70_000), (0, 4), (1, 7), (3, 9_001), (64, 40_000)):
        piece, got = memory[start : start + length], torch.full((1,), 5).to(draw.device)
        want = torch.full((1,), 5)
        cuda.add_checksum(piece, got, 3)
        add_checksum(piece.cpu(), want, 3)
        assert got.item() == want.item(), (start, length)
    for place in (0, 17, 4095, 39_999):
        changed = memory[:40_000].clone()
        changed[place] ^= 0x80
        changed_sum, want = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        add_checksum(changed.cpu(), changed_sum)
        add_checksum(memory[:40_000].cpu(), want)
        assert changed_sum.item() != want.item()
    halves, swapped = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for total, order in ((halves, (0, 8)), (swapped, (8, 0))):
        for first, at in enumerate(order):
            add_checksum(memory[at : at + 8].cpu(), total, first * 2)
    assert halves.item() != swapped.item()


def page_checksums(draw: Draw) -> None:
    """Each is that of the page's bytes, layer after layer; of pages in any order, of more layers than are summed at
    once, and of bytes that fill no word."""
    for num_layers, num_pages, num_bytes in ((3, 7, 8 * 2500), (2, 5, 36), (3, 3, 7), (1, 40, 64), (19, 3, 8 * 1024)):
        bytes_LPB = draw.integers(0, 256, num_layers, num_pages, num_bytes).to(torch.uint8)
        pages = [page for page in (*range(0, num_pages, 2), 1) for _ in range(1 + (page == 2))]
        got = torch.full((len(pages),), 5).to(draw.device)
        cuda.add_page_checksums(bytes_LPB, torch.tensor(pages).to(draw.device), got, 3)
        for page, total in zip(pages, got.tolist()):
            want = torch.full((1,), 5)
            add_checksum(bytes_LPB[:, page].cpu().contiguous().view(-1), want, 3, (word_bytes(bytes_LPB, WIDE_WORDS),))
            assert total == want.item(), (num_bytes, page)


ALL = (slots_of_choices, counts_of_choices, checksums, page_checksums)
