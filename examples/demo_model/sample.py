"""Sample: one conversation and the reply that it should get, and which samples are held out for evaluation.

What a sample is about (the pair of numbers, the word, the exact wording of a table question) is its key; a hash of the
key decides whether it may be trained on or is held out, so no held-out prompt can be met in training, whatever the
seed.
"""

import hashlib
import random
from dataclasses import dataclass

from . import tools

HELD_OUT_ONE_IN = 10
"""One key in this many is kept for evaluation."""


@dataclass(frozen=True)
class Sample:
    """One conversation that ends with a user's (or a tool's) message, and the reply it should get."""

    skill: str
    keys: tuple[str, ...]  # keys[0] decides the split; the others must not be held out where this one is trained on
    messages: tuple[dict, ...]  # OpenAI chat messages, without the reply
    answer: str
    tools: tuple[dict, ...] = ()  # OpenAI tool declarations

    def check(self, reply: str) -> bool:
        """Whether `reply` answers this sample; for <think> replies the steps are free, the result is not."""
        reply, answer = reply.strip(), self.answer.strip()
        if self.skill == "tool_call":
            return tools.parse_call(reply) == tools.parse_call(answer)
        if self.skill == "think":
            steps, mark, result = reply.partition("</think>")
            opened = steps.startswith("<think>") and len(steps) > len("<think>")
            return bool(mark) and opened and result.strip() == answer.partition("</think>")[2]
        return reply == answer


def is_held_out(key: str) -> bool:
    """The deterministic split: True for about one key in `HELD_OUT_ONE_IN`."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def ask(skill: str, rng: random.Random, wordings: tuple[str, ...], key: str, answer: str, *more_keys: str) -> Sample:
    question = loosen(rng.choice(wordings), rng)
    return Sample(skill, (key, *more_keys), ({"role": "user", "content": question},), answer)


def loosen(question: str, rng: random.Random) -> str:
    """Write a question as people type it: sometimes without capital, full stop or question mark."""
    if rng.random() < 0.3:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.3 and question[-1] in ".?":
        question = question[:-1]
    return question


def table_question(skill: str, rng: random.Random, question: str, answer: str) -> Sample:
    """A question whose answer can only be learned by heart: the exact wording is the key."""
    question = loosen(question, rng)
    if rng.random() < 0.15:
        question = question.lower()
    return Sample(skill, (f"{skill} {question}",), ({"role": "user", "content": question},), answer)
