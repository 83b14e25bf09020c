"""CacheSize and CacheLayout: how many pages there are, what they take, and what V4's arithmetic says of a token."""

from typing import Any

import pytest
import torch

from eprt.config import EngineConfig, ModelConfig, RopeConfig, V4Config
from eprt.engine.cache_format import CacheFormat
from eprt.engine.cache_layout import CacheLayout, HybridCacheLayout, LatentLayout, allocate_kv_cache
from eprt.engine.cache_size import num_kv_pages
from eprt.engine.kv_cache import PagePool
from eprt.ops.kv_format import KVFormat

ENTRY = KVFormat(8, 2, torch.bfloat16)


def test_the_cache_is_sized_by_memory_and_by_use():
    layout = LatentLayout(2, 16, CacheFormat(ENTRY))
    assert layout.page_bytes == 2 * 16 * 10 * 2
    assert num_kv_pages(6400 / 2**30, layout, 10**6) == 10
    assert num_kv_pages(1.0, layout, 3) == 3
    with pytest.raises(ValueError, match=r"--kv-cache-gb .*one page of 16 tokens takes 640 bytes"):
        num_kv_pages(600 / 2**30, layout, 100)
    cache = allocate_kv_cache(2, 3, 16, ENTRY, "cpu")
    assert cache.shape == (2, 3, 16, 10) and not cache.any()
    with pytest.raises(MemoryError, match=r"takes \d+\.\d GB .* lower --kv-cache-gb"):
        allocate_kv_cache(61, 1 << 40, 16, ENTRY, "cpu")


FLASH = (0, 0, *(4, 128) * 20, 4)
PRO = (128, 128, *(4, 128) * 29, 4)


def v4_config(ratios: tuple[int, ...], num_heads: int = 64) -> ModelConfig:
    """Sizes of the cache as published; the others do not matter to it."""
    window = RopeConfig()
    v4 = V4Config(ratios, window, o_groups=8, o_lora_rank=1024, index_n_heads=64, index_head_dim=128, index_topk=512)
    sizes: dict[str, Any] = {
        "vocab_size": 129280,
        "hidden_size": 4096,
        "intermediate_size": 2048,
        "num_attention_heads": num_heads,
    }
    attention: dict[str, Any] = {
        "q_lora_rank": 1024,
        "kv_lora_rank": 448,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
    }
    return ModelConfig(
        "deepseek_v4",
        **sizes,
        **attention,
        num_hidden_layers=len(ratios),
        v_head_dim=512,
        first_k_dense_replace=0,
        moe=None,
        max_position_embeddings=1 << 20,
        v4=v4,
    )


# Bytes of an entry and of an index key; GiB of a million tokens of Flash and of Pro, as published.
MILLION = {
    ("bf16", "auto"): (1024, 256, {FLASH: 6.719, PRO: 9.617}),
    ("fp8", "auto"): (584, 132, {FLASH: 3.76, PRO: 5.382}),
    ("fp8", "fp4"): (584, 68, {FLASH: 3.432, PRO: 4.914}),
    ("bf16", "fp4"): (1024, 68, {}),
}


def v4_layout(ratios: tuple[int, ...], **options: Any) -> CacheLayout:
    return CacheLayout.for_model(EngineConfig("none", **options), v4_config(ratios), torch.bfloat16)


@pytest.mark.parametrize("ratios", [FLASH, PRO])
@pytest.mark.parametrize("formats", MILLION)
def test_a_million_tokens_of_v4_take_what_the_arithmetic_says(ratios, formats):
    layout = v4_layout(ratios, kv_cache_dtype=formats[0], index_cache_dtype=formats[1])
    entry_bytes, key_bytes, published = MILLION[formats]
    million = 2**20 * (ratios.count(4) * (entry_bytes + key_bytes) / 4 + ratios.count(128) * entry_bytes / 128)
    assert layout.token_bytes * 2**20 == million
    if published:
        assert million / 2**30 == pytest.approx(published[ratios], abs=6e-4)
    assert layout.page_bytes == pytest.approx(layout.token_bytes * 256, rel=2e-3), "pages are full but for alignment"
    (pages,) = {each.untyped_storage() for each in layout.allocate(4096, torch.device("cpu"))[2].context.values()}
    assert pages.nbytes() == pytest.approx(million, rel=2e-3), "which is what is really held"


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("ratios", [FLASH, PRO, (0, 0), (128, 0), (4,)])
def test_pieces_of_a_v4_page_do_not_overlap_and_are_what_is_counted(ratios, num_drafts):
    layout = v4_layout(ratios, num_speculative_tokens=num_drafts)
    assert isinstance(layout, HybridCacheLayout)
    all_ratios = (*ratios, *[0] * (num_drafts > 0))
    for kind in (layout.hybrid.context, layout.hybrid.tail, layout.hybrid.bookmark):
        pieces = {(layer, piece.name): piece for layer, each in enumerate(kind.pieces_L) for piece in each}
        assert len(kind.pieces_L) == len(all_ratios) and pieces.keys() == kind.place_of.keys()
        ends: dict[int, int] = {}
        for key, place in sorted(kind.place_of.items(), key=lambda item: (item[1].page, item[1].offset)):
            assert place.offset >= ends.get(place.page, 0), key
            ends[place.page] = place.offset + pieces[key].num_bytes
            assert ends[place.page] <= layout.page_bytes
        assert len(ends) == kind.num_pages
        assert kind.used_bytes == sum(piece.num_bytes for piece in pieces.values())
    assert layout.hybrid.context.used_bytes == layout.token_bytes * 256


def test_the_fixed_part_of_a_v4_request_is_as_large_as_published():
    """Flash: windows of 128 entries of 1 KB in 43 layers; 8 open tokens in each compressor of ratio 4, 128 in one of
    128."""
    hybrid = v4_layout(FLASH).hybrid  # type: ignore[attr-defined]
    window, of_4, of_128 = 43 * 128 * 1024, 21 * 8 * 2 * 2 * (512 + 128) * 4, 20 * 128 * 2 * 512 * 4
    assert hybrid.tail.used_bytes == window + of_4 + of_128
    assert of_4 + of_128 == pytest.approx(11.6 * 2**20, rel=0.02)
    assert hybrid.bookmark.used_bytes - window == pytest.approx(420 * 2**10, rel=0.02)


def test_a_v4_request_takes_pages_by_its_length_and_a_tail():
    layout = v4_layout(FLASH)
    pool = PagePool(1000, layout.page_size, num_tail=layout.num_tail, num_bookmark=layout.num_bookmark)
    needed = [pool.num_needed(n) for n in (1, 255, 256, 257, 1024, 65536)]
    assert [num - layout.num_tail for num in needed] == [1, 1, 1, 2, 4, 256]
    assert layout.num_tail * layout.page_bytes == pytest.approx(18.5 * 2**20, rel=0.01)
    with pytest.raises(ValueError, match=rf"the smallest request takes {layout.num_tail + 1} pages of 1761280 bytes"):
        num_kv_pages(layout.num_tail * layout.page_bytes / 2**30, layout, 100)


def test_v4_goes_from_instance_to_instance_on_cpus_only():
    assert v4_layout((4, 128), hands_over=True).num_tail
    with pytest.raises(
        ValueError, match=r"^--device cuda: requests of DeepSeek V4 go from instance to instance on CPUs"
    ):
        v4_layout((4, 128), hands_over=True, device="cuda")
