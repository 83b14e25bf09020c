"""What the scaler sees of instances, and what it has done."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from eprt.engine.sampling_params import SamplingParams
from eprt.serve.errors import ApiError
from eprt.serve.flags import parse_options
from eprt.serve.instances.document import instances_document
from eprt.serve.instances.scale_metrics import ScaleCollector
from eprt.serve.instances.scaler import Scaler, make_rules
from eprt.serve.options import OptionError
from tests.unit.cases import MODEL
from tests.unit.serve.instances.cases import GivenFleet

FLAGS = ("--prefill", "1", "--decode", "2", "--scale-window", "1", "--scale-cooldown", "5", "--max-num-seqs", "9")


class Asked:
    """Takes the place of the starter."""

    def __init__(self, error: ApiError | None = None):
        self.roles: list[str] = []
        self.pending: list[Any] = []
        self._error = error

    def num_pending(self, role: str) -> int:
        return 0

    async def start(self, role: str, num_ranks: int | None) -> None:
        self.roles.append(role)
        if self._error is not None:
            raise self._error

    def on_hello(self, *given) -> None: ...


def run(life: Callable[[GivenFleet, Scaler, Asked], Coroutine], *flags: str, asked: Asked | None = None) -> None:
    async def go() -> None:
        fleet = GivenFleet(*FLAGS, *flags)
        fleet.starter = starter = asked or Asked()  # type: ignore[assignment]
        await life(fleet, Scaler(fleet, fleet.options), starter)  # type: ignore[arg-type]

    asyncio.run(go())


def crowd(fleet: GivenFleet, num: int = 8) -> None:
    """Long prompts that come at once."""
    for i in range(num):
        fleet.submit([([i] * 400, SamplingParams(seed=1))])


def test_a_queue_of_prompts_starts_a_prefill_instance():
    async def life(fleet: GivenFleet, scaler: Scaler, asked: Asked) -> None:
        for i in range(3):
            crowd(fleet, 3)
            await scaler.look(float(i))
        assert asked.roles == ["prefill"] and scaler.roles["prefill"].num_started == 1
        crowd(fleet, 1)
        await scaler.look(3.0)
        assert asked.roles == ["prefill"], "it is cooling down"
        scale: Any = instances_document(fleet)["scale"]
        assert scale["mode"] == "auto" and scale["roles"]["prefill"]["started"] == 1
        window = scaler.roles["prefill"].window
        assert window is not None and window.predicted_s > 1 > window.alone_s

    run(life, "--scale", "auto", "--scale-target", "0.5,10", "--max-queue", "99")


def test_advice_is_said_once_and_nothing_is_done(caplog):
    async def life(fleet: GivenFleet, scaler: Scaler, asked: Asked) -> None:
        for i in range(6):
            crowd(fleet, 2)
            await scaler.look(float(i))
        assert asked.roles == [] and scaler.roles["prefill"].wanted == 2
        metrics = {each.name: each for each in ScaleCollector(scaler).collect()}
        wanted = {s.labels["role"]: s.value for s in metrics["eprt_scale_wanted"].samples}
        assert wanted == {"prefill": 2, "decode": 1}, "one of two would do"

    caplog.set_level("INFO")
    run(life, "--scale", "advise", "--scale-target", "0.5,10", "--max-queue", "99")
    lines = [each for each in caplog.messages if each.startswith("scale: would start another prefill instance")]
    assert len(lines) == 1


def test_a_decode_instance_without_work_is_retired():
    async def life(fleet: GivenFleet, scaler: Scaler, asked: Asked) -> None:
        for i in range(6):
            assert fleet.instances["decode-1"].is_open
            await scaler.look(float(i))
        assert fleet.instances["decode-1"].state == "draining" and fleet.instances["decode-0"].is_open
        await scaler.look(99.0)
        assert scaler.roles["decode"].wanted == 2, "one drains"
        assert fleet.instances["prefill-0"].is_open and asked.roles == []

    run(life, "--scale", "auto", "--scale-decode", "1:3")


def test_a_start_that_fails_is_tried_again_after_the_cool_down(caplog):
    async def life(fleet: GivenFleet, scaler: Scaler, asked: Asked) -> None:
        fleet.lose_instance("decode-1")
        for at_s in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0):
            await scaler.look(at_s)
        assert asked.roles == ["decode", "decode"], "two are the least"
        assert scaler.roles["decode"].num_started == 0

    run(life, "--scale", "auto", "--scale-decode", "2:3", asked=Asked(ApiError(500, "no memory", code="start_failed")))
    assert caplog.messages.count("scale: no memory") == 2


def rules(*flags: str):
    return make_rules(parse_options(["--model", str(MODEL), *flags]))


def test_limits_are_those_of_the_first_tier_unless_given():
    flags = ("--prefill", "2", "--decode", "1", "--scale", "auto")
    found = rules(*flags)
    assert [(r.least, r.most, r.target_s) for r in found.values()] == [(1, 4, 1.5), (1, 2, 0.05)]
    assert [r.target_s for r in rules(*flags, "--tier", "max=1,0.03", "--tier", "base=2,0.07").values()] == [1.0, 0.03]
    assert [r.target_s for r in rules(*flags, "--scale-target", "3,0.2").values()] == [3.0, 0.2]
    assert list(rules("--prefill", "0", "--decode", "1", "--scale", "auto")) == ["decode"]
    assert not math.isnan(rules(*flags, "--scale-prefill", "0:9")["prefill"].most)


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--scale", "on"), "--scale on: must be off, advise or auto"),
        (("--scale", "auto", "--scale-prefill", "3"), "--scale-prefill 3: must be MIN:MAX, as 1:4"),
        (("--scale", "auto", "--scale-prefill", "2:4"), "--scale-prefill 2:4: must have 0 <= MIN <= 1 <= MAX"),
        (("--scale", "auto", "--scale-decode", "0:4"), "--scale-decode 0:4: must have 1 <= MIN <= 1 <= MAX"),
        (("--scale", "auto", "--scale-target", "1"), "--scale-target 1: must be seconds to the first token and per"),
        (("--scale", "auto", "--scale-target", "1,0"), "--scale-target 1,0: both must be above 0"),
        (("--scale", "auto", "--scale-window", "0"), "--scale-window 0: must be in 0.1..86400"),
        (("--scale-decode", "1:2"), "--scale-decode 1:2: says nothing without --scale auto or --scale advise"),
    ],
)
def test_bad_flags_are_one_line(flags, words):
    with pytest.raises(OptionError) as caught:
        rules("--prefill", "1", "--decode", "1", *flags)
    assert str(caught.value).startswith(words)
    with pytest.raises(OptionError, match="--scale auto: is of instances; give --prefill and --decode too"):
        rules("-n", "1", "--scale", "auto")
