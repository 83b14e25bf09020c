"""DeepSeek V4's layers on tensors without data, as on a GPU: no look of the host at values, no mix of devices.

Operators are those of CPUs, on zeros of the same shapes, so that what layers pass to them is checked as well.
"""

import copy
import sys
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eprt import EngineConfig, EPGroup, ops
from eprt.engine.graphs import padding_rows
from eprt.layers import hybrid_cache, hybrid_plan, tail_moves
from eprt.layers.batch import ForwardBatch, HostRows, Split, TailMove
from eprt.layers.hybrid_cache import PAGE_TOKENS, HybridLayout, LayerPages
from eprt.models.loader import load_model
from tests import tiny_v4

META, CHUNK = torch.device("meta"), 1024
RATIOS = (0, 4, 128, 0)  # the last one is the MTP layer's
# (first, end) of each request's part of a batch: bookmarks and windows taken over, two groups, decodes and drafts.
SPANS = ((200, 300), (256, 260), (0, 513), (600, 601), (601, 602), (511, 513), (256, 258))


def mapped(value: Any, change: Any) -> Any:
    """The value with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(each, change) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: mapped(getattr(value, each.name), change) for each in fields(value)})
    return value


def zeros(tensor: Tensor) -> Tensor:
    assert tensor.device == META, f"{tensor.dtype} {tuple(tensor.shape)} is on {tensor.device}"
    return torch.zeros_like(tensor, device="cpu")


class MetaOperators(SimpleNamespace):
    """What by_device finds for tensors without data."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = mapped(args, zeros), {key: mapped(value, zeros) for key, value in kwargs.items()}
            if name == "encode_entries":
                return args[1].encode(args[0]).to(META)
            if name == "turned_attention":  # requests' numbers would be found where only zeros are
                return torch.zeros_like(args[0], dtype=kwargs["dtype"], device=META)
            return mapped(getattr(ops, name)(*args, **kwargs), lambda tensor: tensor.to(META))

        return call


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Any:
    root = tmp_path_factory.mktemp("v4")
    model = tiny_v4.make_model(num_hidden_layers=3, compress_ratios=list(RATIOS[:3]), num_hash_layers=1, index_topk=16)
    tiny_v4.save(model, root, more=tiny_v4.mtp_tensors(model), num_nextn_predict_layers=1)
    return load_model(EngineConfig(str(root), chunk_size=CHUNK, num_speculative_tokens=1), EPGroup.single())


@pytest.fixture
def model(loaded, monkeypatch) -> Any:
    """Without experts, which have tests of their own."""
    by_device = sys.modules["eprt.ops.by_device"]
    monkeypatch.setitem(sys.modules, "meta_operators", MetaOperators())
    monkeypatch.setitem(by_device._MODULES, "meta", "meta_operators")
    for module in (hybrid_cache, hybrid_plan, tail_moves):
        monkeypatch.setattr(module, "upload", lambda arrays, device: [torch.from_numpy(a).to(device) for a in arrays])
    for layer in (*loaded.layers, loaded.mtp.layer):
        layer.mlp = lambda h_TH: h_TH
    monkeypatch.setattr(Tensor, "__deepcopy__", lambda tensor, memo: tensor.to(META))
    on_meta = copy.deepcopy(loaded, {id(loaded.exchange): loaded.exchange})
    on_meta.device = META
    yield on_meta
    by_device.implementations.cache_clear()


def pages(model: Any, dtype: torch.dtype, index_cache: str) -> tuple[HybridLayout, list[LayerPages]]:
    layout = HybridLayout.for_model(model.config, RATIOS, dtype, index_cache, 1)
    return layout, layout.layers(torch.empty(40, layout.page_bytes, dtype=torch.uint8, device=META))


def prompts(layout: HybridLayout) -> ForwardBatch:
    num_tail, num_bookmark = layout.tail.num_pages, layout.bookmark.num_pages
    lengths = [end - first for first, end in SPANS]
    tails = [0, 1, 2, 3, 3, 5, 6]  # the fifth is a draft of the fourth
    host = HostRows(
        np.cumsum([0, *lengths]).astype(np.int32),
        np.array([end for _, end in SPANS], np.int32),
        np.array([[tail] * num_tail for tail in tails], np.int32),
    )
    bookmarks = [TailMove(*where, (page,) * num_bookmark) for *where, page in ((0, 256, 9), (2, 256, 10), (2, 512, 11))]
    num_tokens, numbers = sum(lengths), {"dtype": torch.int64, "device": META}
    assert host.tail_BF is not None
    seq_len_B, query_start_B1, tail_BF = (
        torch.from_numpy(each).to(META) for each in (host.seq_len_B, host.query_start_B1, host.tail_BF)
    )
    return ForwardBatch(
        *(torch.empty(num_tokens, **numbers) for _ in range(3)),
        torch.empty(len(SPANS), 3, dtype=torch.int32, device=META),
        seq_len_B,
        query_start_B1,
        0,
        torch.empty(3, **numbers),
        tail_BF=tail_BF,
        host=host,
        longest=602,
        bookmarks=(*bookmarks, TailMove(5, 512, (12,) * num_bookmark)),
        takeovers=(TailMove(1, 256, (5,) * num_bookmark), TailMove(6, 256, (9,) * num_bookmark)),
        split=Split.in_middle(host.query_start_B1.tolist()),
    )


CACHES = [(torch.float32, "auto"), (torch.uint8, "auto"), (torch.bfloat16, "fp4")]


@pytest.mark.parametrize(("dtype", "index_cache"), CACHES)
def test_prompts_need_nothing_from_the_device(model, dtype, index_cache):
    layout, layers = pages(model, dtype, index_cache)
    batch = prompts(layout)
    with torch.inference_mode():
        logits, hidden = model.forward_with_hidden(batch, layers[:3])
        drafts = model.draft_logits(model.draft(hidden, batch, layers[3]))
        halves = model.forward(replace(batch, overlap="tbo"), layers[:3])
    assert {each.device for each in (logits, drafts, halves)} == {META} and logits.shape == halves.shape


@pytest.mark.parametrize("num_pages", [1, 4])
@pytest.mark.parametrize(("dtype", "index_cache"), CACHES)
def test_decodes_need_nothing_from_the_device(model, dtype, index_cache, num_pages):
    layout, layers = pages(model, dtype, index_cache)
    num_tail, num_bookmark = layout.tail.num_pages, layout.bookmark.num_pages
    rows = padding_rows(6, num_pages, PAGE_TOKENS, 39, META, num_tail=num_tail)
    batch = replace(rows, bookmarks=tuple(TailMove(i, 256 * i, (9 + i,) * num_bookmark) for i in (1, 2)))
    with torch.inference_mode():
        logits, hidden = model.forward_with_hidden(batch, layers[:3])
        tail_moves.leave_bookmarks(batch, layers)
        model.draft(hidden, batch, layers[3])
        halves = model.forward(replace(batch, overlap="tbo"), layers[:3])
    assert logits.shape == halves.shape == (6, model.config.vocab_size) and logits.device == META


def test_a_look_at_values_and_a_mix_of_devices_would_show():
    with pytest.raises(RuntimeError):
        torch.empty(3, device=META).tolist()
    with pytest.raises(AssertionError, match="is on cpu"):
        MetaOperators().rms_norm(torch.empty(2, 4, device=META), torch.ones(4), 1e-6)
