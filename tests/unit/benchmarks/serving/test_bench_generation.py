"""What bench_generation makes of measured steps."""

import pytest

pytest.importorskip("triton")

from types import SimpleNamespace

from benchmarks.serving.bench_generation import GenerationTable
from benchmarks.serving.floors import FULL_DEPTH, GpuRates, floor_seconds, full_depth
from benchmarks.shapes import DEEPSEEK_V3
from benchmarks.tools.report import BenchmarkReport
from eprt import EngineConfig
from eprt.models.hf_config import read_model_config


def measured(itl_ms: dict[int, float]) -> GenerationTable:
    measuring = object.__new__(GenerationTable)
    measuring.report, measuring.itl_s = BenchmarkReport("test", {}), {n: ms / 1e3 for n, ms in itl_ms.items()}
    return measuring


def test_throughput_at_a_latency_lies_between_two_measurements():
    measuring = measured({32: 30.0, 64: 40.0, 96: 60.0, 128: 70.0})
    measuring.at_latency(0.05)
    (row,) = measuring.report.rows
    assert (row["requests"], row["tokens_per_s_gpu"]) == (80, pytest.approx(1600))
    for itl_ms in ({32: 30.0, 64: 40.0}, {64: 60.0}, {}):
        measuring = measured(itl_ms)
        measuring.at_latency(0.05)
        assert not measuring.report.rows, "nothing is told beyond what was measured"


def test_layers_that_lack_take_as_long_as_those_between_the_depths():
    assert full_depth(0.020, 0.014, 20, 10) == pytest.approx(0.020 + (FULL_DEPTH - 20) * 0.0006)
    assert full_depth(0.05, None, FULL_DEPTH, 0) == 0.05


def test_the_floor_counts_what_must_be_read():
    """DeepSeek-V3 on 8 GPUs, in round numbers: 11.5 GB of attention, 1.2 of dense MLPs, 2.6 of shared experts, 81.7 of
    experts, 1.9 of the head; 43.7 of cache, whose products take longer than its bytes."""
    model = SimpleNamespace(config=read_model_config(EngineConfig(str(DEEPSEEK_V3), load_format="dummy")))
    rates = GpuRates(hbm=1e12, tensor=790e12)
    plain, tensor = floor_seconds(model, 128, 4864, 8, rates)
    sent_s = 58 * 128 * 8 * 7 / 8 * 7168 * (1 + 4 / 128 + 2) / 450e9
    assert plain == pytest.approx((11.5 + 1.2 + 2.6 + 81.7 + 1.9 + 43.7) / 1e3 + sent_s, rel=0.02)
    assert tensor == plain, "at 1 TB/s bytes take longer"
    fast = floor_seconds(model, 128, 4864, 8, GpuRates(hbm=4.4e12, tensor=790e12))
    assert fast[1] - fast[0] == pytest.approx(61 * 128 * 4864 * (2 * 128 * 1088 / 790e12 - 1152 / 4.4e12), rel=1e-6)
