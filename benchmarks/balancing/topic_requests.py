"""Questions to the demo model, some topics asked far more often than others, and an engine that is always full of them.

Knows no placement.
"""

import random

from eprt import SamplingParams
from eprt.engine.engine import Engine
from eprt.engine.tokenizer import Tokenizer
from examples.demo_model import chat, skills
from examples.demo_model.sample import Sample

MOST_TOKENS = 256  # of an answer; more than the longest one has


class TopicQuestions:
    """Prompts without end, the same for the same seed. The n-th topic of a random order has a share of 1 / n.

    held_out: of the questions that the model was not taught.
    """

    def __init__(self, tokenizer: Tokenizer, seed: str, held_out: bool):
        topics = sorted(skills.SKILLS)
        random.Random(0).shuffle(topics)  # the same favourites for every seed
        self._topics, self._shares = topics, [1 / (i + 1) for i in range(len(topics))]
        self._tokenizer, self._rng, self._held_out = tokenizer, random.Random(seed), held_out

    def draw(self) -> Sample:
        (topic,) = self._rng.choices(self._topics, self._shares)
        return skills.draw(topic, self._rng, self._held_out)

    def next(self) -> list[int]:
        sample = self.draw()
        return self._tokenizer.encode(chat.render(sample.messages, sample.tools), add_special_tokens=False)


class FullEngine:
    """One rank's engine; a request that has ended makes room for the next question at once."""

    def __init__(self, engine: Engine, num_requests: int):
        self.engine, self._num_requests = engine, num_requests
        self._running: set[str] = set()
        self._num_asked = 0

    def begin(self, questions: TopicQuestions) -> None:
        """Drops what runs, and asks anew."""
        for request_id in self._running:
            self.engine.abort(request_id)
        self._running.clear()
        self._questions = questions
        self._fill()

    def step(self) -> int:
        """Tokens that this rank computed."""
        result = self.engine.step()
        self._running -= {output.request_id for output in result.outputs if output.finish_reason is not None}
        self._fill()
        return result.num_tokens

    def _fill(self) -> None:
        while len(self._running) < self._num_requests:
            self._num_asked += 1
            request_id = str(self._num_asked)
            self.engine.add_request(
                request_id, self._questions.next(), SamplingParams(max_tokens=MOST_TOKENS, temperature=0)
            )
            self._running.add(request_id)
