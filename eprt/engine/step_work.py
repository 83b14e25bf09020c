"""StepWork: how many steps this rank has taken and how long they took. Knows nothing of what they computed."""

from dataclasses import dataclass


@dataclass(slots=True)
class StepWork:
    """Since the start. A step counts where any rank has a token in it."""

    num_steps: int = 0
    last_step_s: float = 0.0
    total_s: float = 0.0  # of all steps; pauses between them, as when all ranks sleep, are left out

    def count_step(self, took_s: float) -> None:
        self.num_steps += 1
        self.last_step_s = took_s
        self.total_s += took_s
