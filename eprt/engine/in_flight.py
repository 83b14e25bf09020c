"""InFlight: what is kept of a step between its launch and the moment when its tokens are looked at."""

from dataclasses import dataclass

from eprt.engine.sampler import Sample
from eprt.engine.schedule import Schedule
from eprt.gpu.readback import HostSnapshot


@dataclass(frozen=True)
class InFlight:
    """A step that has been launched and not settled. sample: None where this rank has no token to choose.

    held: how many of the drafts that it computed hold (drafter.py), None without.
    """

    schedule: Schedule
    sample: Sample | None
    prompt_logprobs: list[list]
    held: HostSnapshot | None
