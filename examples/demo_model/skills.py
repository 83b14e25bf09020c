"""What the demo model is taught: one generator per skill, which draws a `Sample` from a `random.Random`."""

import json
import random

from . import lexicon, tools
from .arithmetic import add, multiply, subtract, think
from .listing import (
    count_letters,
    count_range,
    count_words,
    repeat,
    reverse_letters,
    reverse_words,
    sort_numbers,
    sort_words,
    spell,
)
from .sample import Sample, ask, is_held_out, loosen, table_question
from .words import any_word, invent_word

SMALL_TALK_PHRASES = {phrase for phrases in lexicon.SMALL_TALK.values() for phrase in phrases.split("|")}


def draw(skill: str, rng: random.Random, held_out: bool = False) -> Sample:
    """Draw a sample of `skill` from the asked side of the split."""
    while True:
        sample = SKILLS[skill](rng)
        if held_out and is_held_out(sample.keys[0]):
            return sample
        if not held_out and not any(is_held_out(key) for key in sample.keys):
            return sample


def held_out_samples(skill: str, count: int, seed: int = 0) -> list[Sample]:
    """Up to `count` different held-out samples; fewer where the skill has no more (small tables)."""
    rng = random.Random(f"{skill}/{seed}")
    found: dict[str, Sample] = {}
    for _ in range(20 * count):
        sample = draw(skill, rng, held_out=True)
        found.setdefault(json.dumps([sample.messages, sample.tools]), sample)
        if len(found) == count:
            break
    return list(found.values())


def facts(rng: random.Random) -> Sample:
    """A made-up table of lands, and a few real capitals."""
    if rng.random() < 0.3:
        land, fact = rng.choice(list(lexicon.CAPITALS)), "capital"
        value = lexicon.CAPITALS[land]
    else:
        land, column = rng.choice(list(lexicon.LANDS)), rng.randrange(len(lexicon.LAND_FACTS))
        fact = lexicon.LAND_FACTS[column]
        value = lexicon.LANDS[land].split(maxsplit=len(lexicon.LAND_FACTS) - 1)[column]
    question = rng.choice(lexicon.FACT_QUESTIONS).format(fact=fact, land=land)
    return table_question("facts", rng, question, f"The {fact} of {land} is {value}.")


def small_talk(rng: random.Random) -> Sample:
    """What newcomers type first."""
    reply = rng.choice(list(lexicon.SMALL_TALK))
    question = rng.choice(lexicon.SMALL_TALK[reply].split("|"))
    question = question[0].upper() + question[1:] + rng.choice(("", "", ".", "!", "?"))
    return table_question("small_talk", rng, question, reply)


def recite(rng: random.Random) -> Sample:
    """Short texts known by heart."""
    text = rng.choice(list(lexicon.RECITALS))
    question = f"{rng.choice(lexicon.RECITE_VERBS)} {rng.choice(lexicon.RECITALS[text].split('|'))}"
    question = question[0].upper() + question[1:] + rng.choice(("", ".", "?", "!"))
    return table_question("recite", rng, question, text)


def unknown(rng: random.Random) -> Sample:
    """Questions outside of everything taught get an honest reply."""
    kind = rng.random()
    if kind < 0.15:
        a, b = rng.randint(100, 9999), rng.randint(2, 9999)
        if rng.random() < 0.5:
            a, b = b, a
        op = rng.choice("+-")
        wordings = (f"What is {a} {op} {b}?", f"{a} {op} {b}", f"{a}{op}{b}", f"Compute {a} {op} {b}.")
        return ask("unknown", rng, wordings, f"large {a} {b}", lexicon.SUM_TOO_LARGE_REPLY)
    if kind < 0.3:
        fact = rng.choice(lexicon.LAND_FACTS)
        question = rng.choice(lexicon.FACT_QUESTIONS).format(fact=fact, land=tools.any_land(rng))
    elif kind < 0.6:
        pool = (lexicon.COMMON_WORDS, lexicon.COMMON_WORDS, lexicon.PRONOUNS, lexicon.PRONOUNS, lexicon.TOPICS)
        words = [
            any_word(rng) if rng.random() < 0.6 else rng.choice(rng.choice(pool)) for _ in range(rng.randint(1, 8))
        ]
        question = " ".join(words)
        if question in SMALL_TALK_PHRASES:
            question += " " + words[0]
        question = question.capitalize() + rng.choice(("", "", ".", "?", "!"))
    else:
        fillers = {"topic": rng.choice(lexicon.TOPICS), "word": any_word(rng), "city": tools.any_city(rng)}
        question = rng.choice(lexicon.UNKNOWN_QUESTIONS).format(**fillers) + rng.choice(("", ".", "?"))
    return table_question("unknown", rng, question, lexicon.UNKNOWN_REPLY)


def recall(rng: random.Random) -> Sample:
    """Remember what was said one or two turns before."""
    kind = rng.choice(("name", "number", "color", "word"))
    name = rng.choice(lexicon.NAMES) if rng.random() < 0.5 else invent_word(rng, rng.randint(3, 7)).capitalize()
    color = rng.choice(lexicon.COLORS)
    value = {"name": name, "color": color, "number": str(rng.randrange(1000)), "word": any_word(rng)}[kind]
    told = {
        "name": (f"My name is {value}.", f"I am {value}.", f"Hello, I am {value}.", f"Hi, my name is {value}"),
        "color": (f"My favorite color is {value}.", f"I like the color {value}."),
        "number": (f"Remember the number {value}.", f"My lucky number is {value}."),
        "word": (f"Remember the word {value}.", f"The secret word is {value}."),
    }[kind]
    asked = {
        "name": ("What is my name?", "Who am I?", "Do you remember my name?"),
        "color": ("What is my favorite color?", "Which color do I like?"),
        "number": ("Which number was it?", "What is the number?", "What was the number?"),
        "word": ("Which word was it?", "What is the word?", "What was the word?"),
    }[kind]
    greeting = f"Nice to meet you, {value}." if kind == "name" else f"I will remember: {value}."
    messages = [loosen(rng.choice(told), rng), greeting]
    if rng.random() < 0.1:
        return Sample("recall", (f"recall {value}",), ({"role": "user", "content": messages[0]},), greeting)
    keys = [f"recall {value}"]
    if rng.random() < 0.5:
        middle = rng.choice((add, facts, small_talk, spell))(rng)
        messages += [middle.messages[0]["content"], middle.answer]
        keys += middle.keys
    messages.append(loosen(rng.choice(asked), rng))
    roles = ("user", "assistant")
    history = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(messages))
    return Sample("recall", tuple(keys), history, f"Your name is {value}." if kind == "name" else f"It is {value}.")


def tool_call(rng: random.Random) -> Sample:
    """Call the declared tool that fits the question, under its declared names."""
    request = tools.draw_request(rng)
    declared = tools.declare(rng, request.kind)
    answer = tools.format_call(declared, request)
    keys = (f"tool {request.kind} {request.argument}",)
    return Sample(
        "tool_call", keys, ({"role": "user", "content": loosen(request.question, rng)},), answer, declared.all_tools
    )


def tool_answer(rng: random.Random) -> Sample:
    """Put a tool's result into words."""
    request = tools.draw_request(rng)
    declared = tools.declare(rng, request.kind)
    result, answer = tools.draw_result(rng, request)
    messages = ({"role": "user", "content": loosen(request.question, rng)}, *tools.history(declared, request, result))
    keys = (f"tool {request.kind} {request.argument}",)
    return Sample("tool_answer", keys, messages, answer, declared.all_tools)


def no_tool(rng: random.Random) -> Sample:
    """Say so when a question needs a tool and none, or only a wrong one, was declared."""
    request = tools.draw_request(rng)
    others = tools.declare(rng, None, without=request.kind).all_tools if rng.random() < 0.4 else ()
    messages = ({"role": "user", "content": loosen(request.question, rng)},)
    return Sample("no_tool", (f"tool {request.kind} {request.argument}",), messages, lexicon.NO_TOOL_REPLY, others)


SKILLS = {
    generator.__name__: generator
    for generator in (
        add,
        subtract,
        multiply,
        sort_words,
        sort_numbers,
        count_words,
        reverse_words,
        reverse_letters,
        spell,
        count_letters,
        repeat,
        count_range,
        facts,
        small_talk,
        recite,
        unknown,
        think,
        recall,
        tool_call,
        tool_answer,
        no_tool,
    )
}
