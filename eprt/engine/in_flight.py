"""InFlight: what is kept of a step between its launch and the moment when its tokens are looked at."""

from dataclasses import dataclass

from eprt.engine.sampler import Sample
from eprt.engine.schedule import Schedule
from eprt.gpu.readback import HostSnapshot


@dataclass(frozen=True)
class InFlight:
    """A step that has been launched and whose tokens nobody has looked at yet."""

    schedule: Schedule
    sample: Sample | None  # None where this rank has no token to choose
    prompt_logprobs: list[list]
    held: HostSnapshot | None  # how many of the drafts that the step computed are accepted; None without drafts
