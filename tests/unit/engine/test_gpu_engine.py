"""What serving on GPUs rests on and needs none: local exchange, dummy weights, choice of device, flags, graph sizes."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from eprt import LLM, EngineConfig, EPGroup
from eprt.engine.graphs import graph_sizes
from eprt.engine.warm_up import record_decodes, tell_of_graphs
from eprt.ep.config import EPConfig
from eprt.ep.placement.load import DeviceLoadRecorder, LoadRecorder
from eprt.ep.registry import make_backend
from eprt.gpu.device import take_device
from eprt.models.deepseek_builder import load_deepseek
from eprt.models.loader import load_model
from eprt.ops import tuning
from eprt.ops.tuning import ProductShape, Tiling
from tests import tiny
from tests.paged import PagedRunner
from tests.ranks import cases_ep

DEMO = str(Path(__file__).resolve().parents[3] / "examples" / "demo_model" / "checkpoint")
LOCAL = EPConfig(16, 4, 2, 4, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skew", cases_ep.SKEWS)
def test_local_backend_equals_the_oracle(dtype, skew):
    config = EPConfig(hidden_size=16, num_slots=5, top_k=3, num_max_tokens_per_rank=9, dtype=dtype, mode="low_latency")
    backend = make_backend("local", config, EPGroup.single())
    for seed in range(5):
        tokens = cases_ep.make_tokens(random.Random(seed), config, 1, skew)
        cases_ep.round_trip(backend, tokens, zero_copy=True)  # or y_RH would lack the rows of masked entries


def test_local_backend_refuses_what_it_cannot_do():
    backend = make_backend("local", LOCAL, EPGroup.single())
    with pytest.raises(ValueError, match="num_max_tokens_per_rank=4"):
        backend.dispatch_send(torch.zeros(5, 16), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2))
    handle = backend.dispatch_send(torch.zeros(1, 16), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match="combine_recv"):
        backend.combine_recv(handle)


def test_padding_goes_to_no_expert():
    """A row of token id -1 changes nothing for the others, and its experts are not counted."""
    model = load_model(EngineConfig(DEMO), EPGroup.single())
    (moe, *_) = model.moe_layers()
    x_TH = torch.randn(5, 256).bfloat16()
    want_TH = moe(x_TH[:3], torch.zeros(3, dtype=torch.int64))
    counted = sum(moe.expert_load())
    got_TH = moe(x_TH, torch.tensor([0, 0, 0, -1, -1]))
    assert torch.equal(got_TH[:3], want_TH) and sum(moe.expert_load()) == 2 * counted
    moe.reset_load()
    assert sum(moe.expert_load()) == 0
    model.close()


def test_choices_counted_by_the_device_are_the_same():
    now = LoadRecorder(2, 6, 3)
    later = DeviceLoadRecorder(2, 6, 3, max_tokens=8, device=torch.device("cpu"))
    later.record(0, torch.zeros(2, 3, dtype=torch.int64))  # of a warm-up: does not count
    assert not later.tokens_PLE.any(), "counters never go down"
    for num_tokens, num_decode in ((5, 2), (0, 0), (8, 8), (1, 0)):
        for recorder in (now, later):
            recorder.begin(num_tokens, num_decode)
        for layer in range(2):
            chosen_TK = torch.randint(-1, 6, (num_tokens, 3))
            now.record(layer, chosen_TK)
            later.record(layer, chosen_TK[:3])  # in parts
            later.record(layer, chosen_TK[3:], first=3)
        for recorder in (now, later):
            recorder.end()
    with pytest.raises(ValueError, match=r"a step of 9 tokens: .* at most 8"):
        later.record(0, torch.zeros(5, 3, dtype=torch.int64), first=4)
    assert now.tokens_PLE.sum() > 0
    assert np.array_equal(now.tokens_PLE, later.tokens_PLE) and np.array_equal(now.sample(), later.sample())


def test_dummy_weights_have_the_shape_and_no_files(tmp_path):
    """Also fp8 ones, from a config.json alone; the same in every process."""
    tiny.save(tiny.make_model("v3", hidden_size=256, moe_intermediate_size=128, intermediate_size=384), tmp_path)
    tiny.quantize_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    logits = []
    for _ in range(2):
        model = load_model(EngineConfig(str(tmp_path), load_format="dummy", num_hidden_layers=2), EPGroup.single())
        assert len(model.layers) == 2 and model.layers[1].mlp.experts.pool.weight_format == "fp8"
        runner = PagedRunner(model)
        logits.append(runner.prefill(runner.request(tiny.prompts()[1])))
        model.close()
    assert torch.equal(*logits) and logits[0].isfinite().all() and 0.01 < logits[0].std() < 100


def test_the_shape_of_the_benchmark_is_deepseek_v3():
    from eprt.models.hf_config import read_model_config

    shape = Path(__file__).resolve().parents[3] / "benchmarks" / "shapes" / "deepseek_v3"
    config = read_model_config(EngineConfig(str(shape), num_hidden_layers=5, load_format="dummy"))
    assert (config.num_hidden_layers, config.hidden_size, config.kv_dim, config.quant_method) == (5, 7168, 576, "fp8")
    assert config.moe is not None and (config.moe.num_experts, config.moe.top_k) == (256, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_said_with_its_remedy():
    assert take_device("cpu", EPGroup.single()).type == "cpu"
    assert take_device("auto", EPGroup.single()).type == "cpu"
    with pytest.raises(ValueError, match=r"--device cuda: rank 0 on .* has no NVIDIA GPU .* or use --device cpu"):
        load_model(EngineConfig(DEMO, device="cuda"), EPGroup.single())


def test_graph_sizes_end_at_the_most_rows():
    assert graph_sizes((1, 2, 4, 8, 16), 12) == [1, 2, 4, 8, 12]
    assert graph_sizes((1, 2), 12) == [1, 2, 12]
    assert graph_sizes((), 12) == []


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_decodes_that_are_not_recorded_are_tried_before_serving(monkeypatch, num_drafts):
    """Kernels are compiled, and what cannot attend is told, before a rank waits for another."""
    with LLM(DEMO, EPGroup.single(), kv_cache_gb=0.01, num_speculative_tokens=num_drafts) as llm:
        runner, drafter, tried, guessed = llm.engine.runner, llm.engine.drafter, [], []
        compute = runner.compute
        monkeypatch.setattr(runner, "compute", lambda batch: (tried.append(batch), compute(batch))[1])
        if drafter is not None:
            monkeypatch.setattr(drafter, "guess", lambda batch, hidden_TH: guessed.append((batch, hidden_TH)))
        assert record_decodes(runner, drafter, (), 6, 2, "sbo") == []
        assert [batch.num_decode for batch in tried] == [1, 2, 4, 6]
        assert all((batch.mode, batch.overlap) == ("low_latency", "sbo") for batch in tried)
        assert len(guessed) == (4 if num_drafts else 0) and runner.graphs is None


def test_what_is_recorded_and_what_is_not_is_told(caplog):
    caplog.set_level("INFO")
    tell_of_graphs([1, 8, 64], most_decodes=128, most_rows=64)
    tell_of_graphs([1, 8], most_decodes=8, most_rows=64)
    tell_of_graphs([], most_decodes=8, most_rows=64)
    first, more, second, third = (record.message for record in caplog.records)
    assert "CUDA graphs of 1, 8, 64 rows" in first and "1, 8 rows" in second and "launched anew" in third
    assert "128 rows" in more and "--low-latency-max-tokens 64" in more


def test_products_that_were_not_measured_are_told_once(caplog, monkeypatch, tmp_path):
    caplog.set_level("INFO")
    monkeypatch.setattr(tuning, "_device_name", lambda index: "NVIDIA H900")
    shape = ProductShape(32, 2048, 7168, "fp8", True)
    for _ in range(3):
        assert tuning.tuned(torch.device("cuda", 0), shape, 8, tmp_path) is None
    (record,) = caplog.records
    assert "32 experts" in record.message and "2048 x 7168" in record.message and "NVIDIA H900" in record.message
    assert "tune_grouped_gemm" in record.message
    tuning.read.cache_clear()


def test_an_option_for_gpus_is_refused_where_auto_finds_none(tmp_path):
    with pytest.raises(ValueError, match=r"--overlap-sms 4: divides a GPU, of which --device auto found none"):
        LLM(DEMO, EPGroup.single(), device="auto", overlap_sms=4, kv_cache_gb=0.01)


def test_int8_is_refused_where_auto_finds_gpus():
    engine = EngineConfig(DEMO, device="auto", quantization="int8")
    with pytest.raises(ValueError, match=r"--quantization int8: .* --device auto found GPUs; use --device cpu"):
        load_deepseek(engine, EPGroup.single(), device=torch.device("cuda"))


def test_more_layers_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match=r"--num-hidden-layers 9: .*config\.json has 4 layers; must be in 1\.\.4"):
        load_model(EngineConfig(DEMO, load_format="dummy", num_hidden_layers=9), EPGroup.single())


def test_tilings_are_kept_by_gpu_and_shape_and_found_again(tmp_path):
    shape, other = ProductShape(32, 2048, 7168, "fp8", True), ProductShape(32, 7168, 2048, "fp8", False)
    small, large = Tiling(16, 128, 128, 4, 4, 2), Tiling(64, 128, 128, 8, 4, 2)
    assert tuning.read("NVIDIA H200", tmp_path) == {}
    path = tuning.write("NVIDIA H200", {shape: {8: small}}, tmp_path)
    assert path.name == "NVIDIA_H200.json"
    tuning.write("NVIDIA H200", {shape: {8: small, 64: large}, other: {64: large}}, tmp_path)
    table = tuning.read("NVIDIA H200", tmp_path)
    assert [tuning.lookup(table, shape, rows) for rows in (1, 8, 9, 64, 500)] == [small, small, large, large, large]
    assert tuning.lookup(table, other, 8) == large and tuning.read("NVIDIA H100", tmp_path) == {}
    # Another number of experts finds the nearest; another size or kind finds nothing.
    more = {ProductShape(128, 2048, 7168, "fp8", True): {8: large}, **table}
    assert [tuning.lookup(more, ProductShape(n, 2048, 7168, "fp8", True), 8) for n in (64, 100)] == [small, large]
    assert tuning.lookup(table, ProductShape(32, 2048, 7168, "same", True), 8) is None
    assert tuning.lookup(table, ProductShape(32, 1024, 7168, "fp8", True), 8) is None
    assert tuning.tuned(torch.device("cpu"), shape, 8, tmp_path) is None
    # Dense products: null where cuBLAS was faster, which also takes more rows than any measured.
    tuning.write(
        "NVIDIA H200", {ProductShape(1, 2112, 7168, "dense", False): {16: small, 32: None, 64: large}}, tmp_path
    )
    table = tuning.read("NVIDIA H200", tmp_path)
    found = [tuning.lookup_dense(table, 2112, 7168, rows) for rows in (1, 17, 64, 65)]
    assert found == [(True, small), (True, None), (True, large), (True, None)]
    assert tuning.lookup_dense(table, 2048, 7168, 1) == (False, None)
    path.write_text('[{"experts": 1}]')
    tuning.read.cache_clear()
    with pytest.raises(ValueError, match=r"NVIDIA_H200\.json: not a file of tilings"):
        tuning.read("NVIDIA H200", tmp_path)


def test_the_tilings_that_are_kept_can_be_read():
    files = list(tuning.FOLDER.glob("*.json"))
    assert files
    for path in files:
        for shape, tilings in tuning.read(path.stem).items():
            assert shape.kind in ("fp8", "same", "dense") and tilings
