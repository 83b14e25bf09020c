"""What a rank tells of what it had to work with: known names, growing totals."""

from types import SimpleNamespace
from typing import Any

import torch
from eprt.diagnostics.log.usage import USAGE

from eprt.engine.step_work import StepWork
from eprt.serve.ranks.usage_meter import UsageMeter, gpu_name


def engine(attention_us: float | None) -> Any:
    model = SimpleNamespace(device=torch.device("cpu"), attention_us=lambda: attention_us)
    runner = SimpleNamespace(num_tokens=7, num_context_tokens=900)
    work = StepWork()
    work.count_step(0.5)
    work.count_step(0.25)
    return SimpleNamespace(model=model, runner=runner, work=work, team=None)


def test_totals_have_known_names_and_the_engines_counts():
    meter = UsageMeter(engine(12.5))
    meter.sample_clock()
    totals = meter.totals()
    assert totals.keys() <= set(USAGE) and not any(name.startswith("gpu") for name in totals)
    assert (totals["tokens"], totals["context_tokens"], totals["attention_us"]) == (7, 900, 12.5)
    assert (totals["steps"], totals["step_us"]) == (2, 750_000)
    assert meter.totals()["cpu_us"] >= totals["cpu_us"] > 0


def test_waits_for_a_team_are_no_attention():
    one = engine(12.5)
    one.team = SimpleNamespace(barrier=SimpleNamespace(waited_us=2.5))
    assert UsageMeter(one).totals()["attention_us"] == 10


def test_what_is_not_measured_is_not_told():
    assert "attention_us" not in UsageMeter(engine(None)).totals()
    assert gpu_name(engine(None)) is None


def test_the_latest_step_is_kept():
    work = StepWork()
    work.count_step(0.5)
    work.count_step(0.25)
    assert (work.num_steps, work.last_step_s, work.total_s) == (2, 0.25, 0.75)
