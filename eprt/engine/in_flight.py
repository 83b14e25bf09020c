"""InFlight: what is kept of a step between its launch and the moment when its tokens are looked at."""

from dataclasses import dataclass

from torch import Tensor

from eprt.engine.runner import Packed
from eprt.engine.sampler import Sample
from eprt.engine.schedule import Schedule


@dataclass(frozen=True)
class InFlight:
    """A step that has been launched and not settled. sample: None where this rank has no token to choose.

    drafted_TH: what drafts are read from (drafter.py), None without.
    """

    schedule: Schedule
    packed: Packed
    sample: Sample | None
    prompt_logprobs: list[list]
    drafted_TH: Tensor | None
