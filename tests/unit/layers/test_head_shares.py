"""Which heads and columns each rank of a team has, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from eprt.config import EngineConfig
from eprt.ep.group.group import EPGroup
from eprt.layers.attention_team import AttentionTeam
from eprt.layers.head_shares import HeadShares
from eprt.model_config import IndexerConfig, ModelConfig

V3 = ModelConfig(
    model_type="deepseek_v3",
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=3,
    moe=None,
)


def shares(size: int, config: ModelConfig = V3, form: str = "gather") -> HeadShares:
    return HeadShares.for_config(EngineConfig("model", attention_tp=size, attention_tp_form=form), config)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 64])
@pytest.mark.parametrize("quant_method", [None, "fp8"])
def test_each_head_and_column_is_one_ranks(size, quant_method):
    """In order, as evenly as blocks of scales allow."""
    config = replace(V3, quant_method=quant_method, hidden_size=8192)
    split = shares(size, config)
    for parts, total in ((split.heads, 128), (split.columns, 8192)):
        assert [i for part in parts for i in part] == list(range(total))
        step = 1 if quant_method is None else (2 if total == 128 else 128)
        assert max(map(len, parts)) - min(map(len, parts)) <= step
        assert all(part.start % step == 0 for part in parts)
    assert split.most_heads == max(map(len, split.heads)) and split.num_ranks == size


def test_what_cannot_be_shared_is_refused():
    few = replace(V3, num_attention_heads=4)
    with pytest.raises(ValueError, match=r"--attention-tp 5: this model has 4 heads: must be in 1\.\.4"):
        shares(5, few)
    fp8 = replace(few, quant_method="fp8")
    with pytest.raises(ValueError, match=r"4 heads, 2 of them inseparable, as they share blocks .* in 1\.\.2"):
        shares(4, fp8)
    narrow = replace(fp8, num_attention_heads=128, hidden_size=256)
    with pytest.raises(ValueError, match=r"256 wide, in fp8 blocks of 128: .* --attention-tp-form reduce"):
        shares(4, narrow)
    assert shares(4, narrow, "reduce").most_heads == 32
    indexer = IndexerConfig(num_heads=64, head_dim=128, top_k=2048)
    with pytest.raises(ValueError, match=r"--attention-tp 2: .* not with V3\.2, whose attention has an indexer; leave"):
        shares(2, replace(V3, indexer=indexer))


def test_ranks_that_make_no_teams_are_refused():
    engine, four = EngineConfig("model", attention_tp=2), {"rank": 1, "size": 4, "num_nodes": 2}
    AttentionTeam.require_fit(engine, cast(EPGroup, SimpleNamespace(**four, local_ranks=range(4))))
    with pytest.raises(ValueError, match=r"\[rank 1/4\] --attention-tp 2: .* share memory, and these are of 2 nodes"):
        AttentionTeam.require_fit(engine, cast(EPGroup, SimpleNamespace(**four, local_ranks=(0, 1))))
    with pytest.raises(ValueError, match="--attention-tp 2: 3 ranks make no teams of 2; take a multiple of that"):
        AttentionTeam.require_fit(engine, cast(EPGroup, SimpleNamespace(rank=0, size=3)))


@pytest.mark.parametrize(
    "options, what",
    [
        ({"attention_tp": 0}, "--attention-tp 0: must be at least 1"),
        ({"attention_tp": 2, "device": "cuda"}, "--attention-tp 2: attention over several ranks works on CPUs only"),
        ({"attention_tp": 2, "device": "auto"}, "--attention-tp 2: .* not with --device auto; leave it out"),
        ({"attention_tp_form": "reduce"}, "--attention-tp-form reduce: is for --attention-tp above 1"),
        ({"attention_tp": 2, "attention_tp_form": "sum"}, "--attention-tp-form sum: must be gather or reduce"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, what):
    with pytest.raises(ValueError, match=what):
        EngineConfig("model", **options)
