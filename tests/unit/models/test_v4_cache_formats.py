"""DeepSeek V4 with its cache in fp8, and its indexer's keys in fp8 and fp4: what is read is what was stored, wherever a
prompt is cut, behind prefix hits and with drafts."""

from typing import Any

import pytest
import torch

from eprt import EngineConfig, EPGroup, SamplingParams
from eprt.engine.engine import Engine
from eprt.layers.hybrid_cache import HybridLayout
from eprt.models.loader import load_model
from eprt.ops.entry_format import EntryFormat
from eprt.ops.index_format import IndexFormat
from tests import tiny_v4
from tests.paged_v4 import HybridRunner

FP8, NUM_TOKENS = torch.uint8, 522
FORMATS = [(FP8, "auto"), (FP8, "fp4"), (torch.float32, "fp4"), (torch.bfloat16, "auto")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(directory, tokens, transformers' log-probabilities); with an MTP layer."""
    model = tiny_v4.make_model()
    more = tiny_v4.mtp_tensors(model)
    directory = tiny_v4.save(model, tmp_path_factory.mktemp("v4"), more=more, num_nextn_predict_layers=1)
    tokens = torch.randint(2, 128, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return directory, tokens, model(tokens[None], use_cache=False).logits[0].float().log_softmax(-1)


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(EngineConfig(str(tiny[0]), chunk_size=1024), EPGroup.single())


class RoundedFormat(EntryFormat):
    """The oracle: plain entries that hold what fp8 ones would."""

    def encode(self, values_XD: torch.Tensor) -> torch.Tensor:
        fp8 = EntryFormat(self.size, self.rope_size, FP8)
        return fp8.decode(fp8.encode_slowly(values_XD))


def with_formats(model: Any, entry: EntryFormat, index: IndexFormat) -> HybridRunner:
    runner = HybridRunner(model)
    runner.layout = HybridLayout(model.config, model.config.v4.compress_ratios, entry, index, 0)
    memory_PB = torch.full((24, runner.layout.page_bytes), 0xFF, dtype=torch.uint8)
    runner.layers = runner.layout.layers(memory_PB)
    return runner


@pytest.mark.parametrize("chunk", [10**9, 37])
def test_attention_reads_what_the_oracle_stores(model, tiny, chunk):
    """To the bit, through all layers: windows, entries of both ratios, and those that an indexer chose."""
    sizes = model.config.v_head_dim, model.config.qk_rope_head_dim
    index = IndexFormat(model.config.v4.index_head_dim, torch.float32)
    want = with_formats(model, RoundedFormat(*sizes, torch.float32), index).log_probs(tiny[1])
    assert torch.equal(with_formats(model, EntryFormat(*sizes, FP8), index).log_probs(tiny[1], chunk), want)
    assert not torch.equal(HybridRunner(model).log_probs(tiny[1]), want)


@pytest.mark.parametrize(("dtype", "index_cache"), FORMATS)
def test_not_a_bit_depends_on_the_chunk(model, tiny, dtype, index_cache):
    formats = {"dtype": dtype, "index_cache": index_cache}
    whole = HybridRunner(model, **formats).log_probs(tiny[1][:300])
    for chunk in (37, 129):
        assert torch.equal(HybridRunner(model, **formats).log_probs(tiny[1][:300], chunk), whole)


@pytest.mark.parametrize(("dtype", "index_cache", "most"), [(FP8, "auto", 0.12), (FP8, "fp4", 0.12)])
def test_log_probabilities_stay_near_transformers(model, tiny, dtype, index_cache, most):
    """On average: random weights choose other experts and entries where scores lie close. With weights and cache in
    bfloat16 it is 0.05."""
    got = HybridRunner(model, dtype=dtype, index_cache=index_cache).log_probs(tiny[1])
    assert 0.01 < (got - tiny[2]).abs().mean() < most


@pytest.mark.parametrize("formats", [("fp8", "auto"), ("fp8", "fp4"), ("auto", "fp4")])
def test_prefix_hits_and_drafts_change_no_token(tiny, formats):
    directory, tokens, _ = tiny

    def answers(num_drafts: int, shares: bool) -> dict[str, list[int]]:
        config = EngineConfig(
            str(directory),
            kv_cache_dtype=formats[0],
            index_cache_dtype=formats[1],
            chunk_size=150,
            kv_cache_gb=0.01,
            max_num_seqs=4,
            num_speculative_tokens=num_drafts,
            enable_prefix_cache=shares,
        )
        engine = Engine(config)
        got: dict[str, list[int]] = {}
        for length in (128, 256, 300, 511, 520):
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)
            engine.add_request(str(length), tokens[:length].tolist(), params)
        while engine.has_work:
            for output in engine.step().outputs:
                got.setdefault(output.request_id, []).append(output.token_id)
            engine.check_integrity()
        assert (engine.stats().num_cached_tokens > 0) == shares
        engine.close()
        return got

    want = answers(0, shares=False)
    assert all(len(tokens) == 6 for tokens in want.values())
    assert answers(0, shares=True) == want
    assert answers(2, shares=True) == want
