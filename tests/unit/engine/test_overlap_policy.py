"""Who chooses what a step overlaps, by which numbers, and what is refused."""

import json
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from benchmarks.tools.report import RESULTS
from eprt import LLM, EngineConfig, EPGroup
from eprt.config import MoEConfig
from eprt.engine.overlap_policy import OverlapPolicy
from eprt.ep.exchange import Exchange
from eprt.ep.registry import make_backend
from eprt.serve.flags import parse_options
from eprt.serve.options import OptionError
from tests.dense_model import DenseModel
from tests.fake_gpu import Group
from tests.paths import DEMO
from tests.unit.layers.test_schedules import config_in

ENOUGH = 0.1  # of a layer's time


class MoEModel(DenseModel):
    """With the exchange of so many ranks."""

    def __init__(self, backend: str, group: EPGroup, moe: MoEConfig | None = None):
        device = "cuda" if backend == "nvlink" else "cpu"
        modes = ("normal", "low_latency")
        self.exchange = Exchange({mode: make_backend(backend, config_in(mode, device), group) for mode in modes})
        self.config, self.device = SimpleNamespace(moe=moe or MoEConfig(64, 64, 32, 8)), torch.device(device)


def policy(overlap: str, model) -> OverlapPolicy:
    return OverlapPolicy.for_model(EngineConfig("somewhere", overlap=overlap), model)


def test_every_rank_chooses_by_what_all_have_seen(gpu):
    two, cpu = MoEModel("nvlink", Group(0, 2)), MoEModel("cpu", EPGroup.single())
    few, many = [0, 1, 5], [0, 1, 8192]
    assert [policy("none", two).for_step(many, mode) for mode in ("normal", "low_latency")] == ["none", "none"]
    assert [policy("tbo", cpu).for_step(few, mode) for mode in ("normal", "low_latency")] == ["tbo", "tbo"]
    assert policy("tbo", cpu).for_step([0, 1], "normal") == "none", "one token is not two halves"
    assert policy("tbo", cpu).for_step([0, 1], "low_latency") == "tbo", "steps of graphs are all alike"
    assert [policy("sbo", two).for_step(many, mode) for mode in ("normal", "low_latency")] == ["none", "sbo"]


@pytest.mark.parametrize("ranks, experts, top_k", [*product((2, 4, 8), (32, 256), (2, 8))])
def test_auto_overlaps_decodes_between_gpus_and_no_prompts(gpu, ranks, experts, top_k):
    chosen = policy("auto", MoEModel("nvlink", Group(0, ranks), MoEConfig(64, 64, experts, top_k)))
    for tokens in (1, 512, 8192, 16384, 65536):
        assert chosen.for_step([tokens] * ranks, "normal") == "none"
        assert chosen.for_step([tokens] * ranks, "low_latency") == "sbo"
    assert chosen.reason == "auto: two-batch overlap saves too little of any prompt that was measured"


def test_auto_is_none_on_cpu_ranks():
    alone = policy("auto", MoEModel("cpu", EPGroup.single()))
    assert alone.for_step([8192], "normal") == alone.for_step([5], "low_latency") == "none"
    assert alone.reason == "auto: one rank sends nothing"


def test_no_measured_prompt_gains_enough_for_auto_to_overlap_it():
    """Should a new measurement save a tenth, the advice of the normal mode is due for another look."""
    files = list(RESULTS.glob("layer_prefill_*gpu.json"))
    rows = [row for path in files for row in json.loads(path.read_text())["rows"]]
    assert len(rows) >= 2 and max(row["tbo_saves"] for row in rows) < ENOUGH


def test_a_model_without_moe_layers_has_nothing_to_overlap():
    assert policy("auto", DenseModel()).for_step([9999], "normal") == "none"
    for overlap in ("tbo", "sbo"):
        with pytest.raises(ValueError, match=f"--overlap {overlap}: the model has no MoE layer"):
            policy(overlap, DenseModel())


def test_sms_to_send_with_need_a_gpu_and_a_backend_that_sends_tile_by_tile(gpu, caplog):
    config = EngineConfig("somewhere", overlap="sbo", overlap_sms=4, device="auto")
    with pytest.raises(ValueError, match="--overlap-sms 4: divides a GPU, of which --device auto found none"):
        OverlapPolicy.for_model(config, MoEModel("cpu", EPGroup.single()))
    assert OverlapPolicy.for_model(config, MoEModel("nvlink", Group(0, 2))).decode == "sbo"
    assert "does nothing here" not in caplog.text
    staged = MoEModel("cpu", EPGroup.single())
    staged.device = torch.device("cuda")
    OverlapPolicy.for_model(config, staged)
    assert "--overlap-sms 4 does nothing here: nothing is sent tile by tile" in caplog.text


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--overlap both", "--overlap both: must be none, tbo, sbo or auto"),
        ("--overlap-sms 8 --device cpu", "--overlap-sms 8: divides a GPU for single-batch overlap"),
        ("--overlap-sms 8 --device cuda --overlap none", "--overlap-sms 8: divides a GPU for single-batch overlap"),
        ("--overlap-sms 8 --device cuda --overlap tbo", "it needs --overlap sbo or auto"),
        ("--overlap-sms 0 --device cuda", r"--overlap-sms 0: must be in 1..64"),
    ],
)
def test_flags_that_cannot_be_are_refused_by_name(flags, message):
    with pytest.raises(OptionError, match=message):
        parse_options(["--model", DEMO, *flags.split()])


def test_flags_reach_the_engine():
    engine = parse_options(["--model", DEMO, "--overlap", "sbo", "--device", "cuda", "--overlap-sms", "6"]).engine
    assert (engine.overlap, engine.overlap_sms) == ("sbo", 6)


def test_an_option_for_gpus_is_refused_where_auto_finds_none(tmp_path):
    with pytest.raises(ValueError, match=r"--overlap-sms 4: divides a GPU, of which --device auto found none"):
        LLM(DEMO, EPGroup.single(), device="auto", overlap_sms=4, kv_cache_gb=0.01)
