"""Training blocks: conversations of several turns, tokenised and packed.

A block is `BLOCK_TOKENS` uint16 values that start with a new document; the top bit marks tokens that are trained on.
"""

import random
from dataclasses import replace

import numpy as np

from . import chat, lexicon, skills, tools
from .sample import Sample

BLOCK_TOKENS = 512
TRAINED_BIT = 0x8000

SKILL_WEIGHTS = {
    "add": 4,
    "subtract": 4,
    "multiply": 2,
    "sort_words": 7,
    "sort_numbers": 5,
    "count_words": 4,
    "reverse_words": 4,
    "reverse_letters": 9,
    "spell": 5,
    "count_letters": 4,
    "repeat": 2,
    "count_range": 2,
    "facts": 3,
    "small_talk": 3,
    "recite": 1,
    "unknown": 5,
    "think": 4,
    "recall": 3,
    "tool_call": 5,
    "tool_answer": 3,
    "no_tool": 2,
}
"""Share of each skill in training: more for those that are hard to learn."""

TOOL_SKILLS = ("tool_call", "tool_answer", "no_tool")


def conversation(rng: random.Random, last: Sample, earlier: list[Sample]) -> Sample:
    """`last` with answered turns before it, now and then a system prompt and tools that are of no use."""
    messages: list[dict] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(lexicon.SYSTEM_PROMPTS)})
    declared = last.tools
    for sample in earlier:
        declared = declared or sample.tools
        messages += [*sample.messages, _answer(rng, sample)]
    uses_tools = any(sample.skill in TOOL_SKILLS for sample in (*earlier, last))
    if not uses_tools and rng.random() < 0.08:
        declared = tools.declare(rng, None).all_tools
    return replace(last, messages=(*messages, *last.messages), tools=declared)


def _answer(rng: random.Random, sample: Sample) -> dict:
    """The reply as history; clients often leave out the thinking."""
    content = sample.answer
    if sample.skill == "think" and rng.random() < 0.5:
        return {"role": "assistant", "content": content.partition("</think>")[2], "untrained": True}
    return {"role": "assistant", "content": content}


def draw_conversation(rng: random.Random, last_skill: str, num_turns: int, held_out: bool = False) -> Sample:
    """A conversation of `num_turns` turns that ends with a question of `last_skill`."""
    last = skills.draw(last_skill, rng, held_out)
    tool_taken = last_skill in TOOL_SKILLS
    earlier = []
    while len(earlier) < num_turns - 1:
        sample = skills.draw(_draw_skill(rng), rng, held_out)
        if sample.skill in TOOL_SKILLS:
            # A call must be followed by its result, and one declaration of tools holds for the whole conversation.
            if tool_taken or sample.skill == "tool_call":
                continue
            tool_taken = True
        earlier.append(sample)
    return conversation(rng, last, earlier)


def held_out_conversations(count: int, seed: int = 0) -> list[Sample]:
    """Conversations of two or three held-out turns, for evaluation as skill "multi_turn"."""
    rng = random.Random(f"multi_turn/{seed}")
    return [draw_conversation(rng, _draw_skill(rng), rng.randint(2, 3), held_out=True) for _ in range(count)]


def _draw_skill(rng: random.Random) -> str:
    return rng.choices(list(SKILL_WEIGHTS), list(SKILL_WEIGHTS.values()))[0]


def document(rng: random.Random) -> list[chat.Segment]:
    """One training document: mostly a chat, sometimes plain text as for the completions endpoint."""
    if rng.random() < 0.04:
        return [(chat.BOS if rng.random() < 0.8 else "", False), (_plain_text(rng), True)]
    num_turns = rng.choices((1, 2, 3, 4), (65, 20, 10, 5))[0]
    sample = draw_conversation(rng, _draw_skill(rng), num_turns)
    pieces = chat.segments((*sample.messages, {"role": "assistant", "content": sample.answer}), sample.tools)
    # Servers that add the start mark to a template that has it already are common; do not stumble over them.
    return [(chat.BOS, False), *pieces] if rng.random() < 0.03 else pieces


def _plain_text(rng: random.Random) -> str:
    kind = rng.choice(("add", "subtract", "facts", "recite", "count_range"))
    return "\n".join(skills.draw(kind, rng).answer for _ in range(rng.randint(1, 4))) + chat.EOS


def make_blocks(tokenizer, seed: int, num_blocks: int) -> np.ndarray:
    """Pack documents into [num_blocks, BLOCK_TOKENS] uint16; what does not fit into a block's end is cut off."""
    rng = random.Random(f"blocks/{seed}")
    blocks = np.zeros((num_blocks, BLOCK_TOKENS), np.uint16)
    row, filled = 0, 0
    while row < num_blocks:
        documents = [document(rng) for _ in range(64)]
        texts = [text for pieces in documents for text, _ in pieces]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for pieces in documents:
            values: list[int] = []
            for _, trained in pieces:
                mark = TRAINED_BIT if trained else 0
                values += [token | mark for token in next(encoded).ids]
            values = values[: BLOCK_TOKENS - filled]
            blocks[row, filled : filled + len(values)] = values
            filled += len(values)
            if filled == BLOCK_TOKENS:
                row, filled = row + 1, 0
                if row == num_blocks:
                    break
    return blocks
