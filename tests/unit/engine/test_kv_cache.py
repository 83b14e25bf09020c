"""PagePool: prefix chains against a record of whole prefixes, exact accounting, eviction order, integrity checks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eprt.engine.cache_format import CacheFormat
from eprt.engine.kv_cache import ROOT_NODE, PagePool
from eprt.ops.kv_format import KVFormat

PAGE = 2


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def put(pool: PagePool, token_ids: np.ndarray) -> list[int]:
    """What a request does with a whole prompt: reuse, allocate, register. Returns its pages."""
    known, node = pool.match_prefix(token_ids, len(token_ids))
    pool.acquire(known)
    pages = list(known)
    for start in range(len(known) * PAGE, len(token_ids) - PAGE + 1, PAGE):
        pages.append(pool.allocate())
        node = pool.register(pages[-1], node, token_ids[start : start + PAGE])
    return pages


class Content:
    """The oracle: what each page holds, as the whole prefix that leads to it, written when a page is filled."""

    def __init__(self, pool: PagePool):
        self.pool = pool
        self.prefix_of_page: dict[int, tuple[int, ...]] = {}

    def put(self, token_ids: np.ndarray) -> list[int]:
        known, _ = self.pool.match_prefix(token_ids, len(token_ids))
        for i, page in enumerate(known):
            assert self.prefix_of_page[page] == tuple(token_ids[: (i + 1) * PAGE].tolist())
        pages = put(self.pool, token_ids)
        for i in range(len(known), len(pages)):
            self.prefix_of_page[pages[i]] = tuple(token_ids[: (i + 1) * PAGE].tolist())
        return pages


@settings(max_examples=200, deadline=None)
@given(
    num_pages=st.integers(1, 12),
    steps=st.lists(
        st.one_of(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(0, 5)), min_size=1, max_size=40
    ),
)
def test_a_hit_is_always_the_same_prefix(num_pages, steps):
    """Two token ids and tiny caches: pages are evicted and reused all the time, in every interleaving."""
    pool = PagePool(num_pages, PAGE)
    content, owned = Content(pool), []
    for step in steps:
        if isinstance(step, int):
            if step < len(owned):
                pool.release(owned.pop(step))
        else:
            token_ids = tokens(*step[: len(step) // PAGE * PAGE])
            known, _ = pool.match_prefix(token_ids, len(token_ids))
            if pool.num_available - pool.num_cached(known) >= len(token_ids) // PAGE - len(known):
                owned.append(content.put(token_ids))
        pool.check_integrity(owned)
        assert pool.num_owned == len({page for pages in owned for page in pages})


def test_only_full_pages_up_to_the_limit_match():
    pool = PagePool(8, PAGE)
    pages = put(pool, tokens(1, 2, 3, 4, 5, 6))
    assert pool.match_prefix(tokens(1, 2, 3, 4, 5, 6), 6)[0] == pages
    assert pool.match_prefix(tokens(1, 2, 3, 4, 5, 6), 5)[0] == pages[:2]
    assert pool.match_prefix(tokens(1, 2, 3, 4, 9, 6), 6)[0] == pages[:2]
    assert pool.match_prefix(tokens(1, 9), 2)[0] == []
    assert pool.match_prefix(tokens(3, 4, 5, 6), 4)[0] == []  # the same page contents, but not the same prefix


def test_the_least_recently_used_end_of_a_chain_goes_first():
    pool = PagePool(4, PAGE)
    first, second = put(pool, tokens(1, 1, 2, 2)), put(pool, tokens(3, 3, 4, 4))
    pool.release(second)
    pool.release(first)
    assert [pool.allocate() for _ in range(4)] == [second[1], second[0], first[1], first[0]]
    assert pool.match_prefix(tokens(1, 1, 2, 2), 4)[0] == []


def test_equal_pages_computed_at_once_stay_private_but_continue_one_chain():
    pool = PagePool(6, PAGE)
    a, b = pool.allocate(), pool.allocate()
    node = pool.register(a, ROOT_NODE, tokens(1, 1))
    assert pool.register(b, ROOT_NODE, tokens(1, 1)) == node
    c = pool.allocate()
    pool.register(c, node, tokens(2, 2))
    pool.release([b, c])
    pool.check_integrity([[a]])
    assert pool.match_prefix(tokens(1, 1, 2, 2), 4)[0] == [a, c]
    assert pool.num_available == 5


def test_a_disabled_prefix_cache_never_matches():
    pool = PagePool(4, PAGE, enable_prefix_cache=False)
    pages = put(pool, tokens(1, 1, 2, 2))
    assert pool.match_prefix(tokens(1, 1, 2, 2), 4) == ([], ROOT_NODE)
    pool.release(pages)
    pool.check_integrity([])
    assert pool.num_available == 4


def test_integrity_names_the_page_that_leaks():
    pool = PagePool(4, PAGE)
    pages = put(pool, tokens(1, 1, 2, 2))
    with pytest.raises(RuntimeError, match=f"KV page {pages[0]}: .*0 owners .*reference count 1"):
        pool.check_integrity([pages[1:]])
    with pytest.raises(RuntimeError, match=f"KV page {pages[1]}: .*2 owners .*reference count 1"):
        pool.check_integrity([pages, pages[1:]])
    pool.release(pages[:1])
    with pytest.raises(RuntimeError, match=f"KV page {pages[0]}: free False, cached True, 1 owners"):
        pool.check_integrity([pages])
    pool._free.append(pool._free[0])
    with pytest.raises(RuntimeError, match=f"KV page {pool._free[0]} is on the free list twice"):
        pool.check_integrity([pages[1:]])


def test_an_fp8_entry_is_its_latent_within_half_a_step_and_its_rotated_key_in_bf16():
    entry = KVFormat.from_name("fp8", 512, 64, torch.bfloat16)
    assert (entry.width, entry.dtype) == (656, torch.uint8)
    kv = torch.randn(9, 576, generator=torch.Generator().manual_seed(0))
    kv[3, :512], kv[4, :512] = 0, kv[4, :512] * 1e4
    back = entry.decode(entry.encode(kv))
    # e4m3 has 3 bits behind the point: half a step is 1/16; below 2^-6 of its scale steps are 2^-9.
    bound = kv[:, :512].abs() / 16 + kv[:, :512].abs().amax(1, keepdim=True) / 448 * 2**-10
    assert ((back - kv)[:, :512].abs() <= bound).all()
    assert torch.equal(back[:, 512:], kv[:, 512:].bfloat16().float())


def test_the_cache_format_goes_by_the_option_and_the_model():
    config: Any = SimpleNamespace(kv_lora_rank=32, qk_rope_head_dim=8, indexer=None, v4=None)
    formats = [CacheFormat.from_name(name, config, torch.float32).latent for name in ("auto", "bf16", "fp8")]
    assert [(f.dtype, f.width) for f in formats] == [(torch.float32, 40), (torch.bfloat16, 40), (torch.uint8, 64)]
    with pytest.raises(ValueError, match=r"multiple of 4 values .* not 30 and 8; use --kv-cache-dtype bf16"):
        KVFormat(30, 8, torch.uint8)
