"""What the demo model is taught: one generator of checkable conversations per skill.

A generator draws a `Sample` from a `random.Random`. What a sample is about (the pair of numbers, the word, the exact
wording of a table question) is its key; a hash of the key decides whether it may be trained on or is held out, so no
held-out prompt can be met in training, whatever the seed.
"""

import hashlib
import json
import random
from dataclasses import dataclass

from . import lexicon, tools
from .words import any_word, invent_word, spelling_word

HELD_OUT_ONE_IN = 10
"""One key in this many is kept for evaluation."""


SMALL_TALK_PHRASES = {phrase for phrases in lexicon.SMALL_TALK.values() for phrase in phrases.split("|")}


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


def _ask(skill: str, rng: random.Random, wordings: tuple[str, ...], key: str, answer: str, *more_keys: str) -> Sample:
    question = loosen(rng.choice(wordings), rng)
    return Sample(skill, (key, *more_keys), ({"role": "user", "content": question},), answer)


def loosen(question: str, rng: random.Random) -> str:
    """Write a question as people type it: sometimes without capital, full stop or question mark."""
    if rng.random() < 0.3:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.3 and question[-1] in ".?":
        question = question[:-1]
    return question


def sum_key(a: int, b: int) -> str:
    """Key of a + b, the same for b + a."""
    return f"sum {min(a, b)} {max(a, b)}"


def difference_key(a: int, b: int) -> str:
    """Key of a - b."""
    return f"difference {a} {b}"


def add(rng: random.Random) -> Sample:
    """Sums of two numbers below 100."""
    a, b = rng.randrange(100), rng.randrange(100)
    wordings = (f"What is {a} + {b}?", f"{a} + {b}", f"{a}+{b}", f"{a} + {b} =", f"Add {a} and {b}.",
                f"Compute {a} + {b}.", f"How much is {a} plus {b}?", f"What is {a} plus {b}?",
                f"What's {a}+{b}?", f"{a}+{b}=?")  # fmt: skip
    return _ask("add", rng, wordings, sum_key(a, b), f"{a} + {b} = {a + b}")


def subtract(rng: random.Random) -> Sample:
    """Differences of two numbers below 100; half of them are negative."""
    a, b = rng.randrange(100), rng.randrange(100)
    wordings = (f"What is {a} - {b}?", f"{a} - {b}", f"{a}-{b}", f"{a} - {b} =", f"Subtract {b} from {a}.",
                f"Compute {a} - {b}.", f"How much is {a} minus {b}?", f"What is {a} minus {b}?",
                f"{a}-{b}=?")  # fmt: skip
    return _ask("subtract", rng, wordings, difference_key(a, b), f"{a} - {b} = {a - b}")


def multiply(rng: random.Random) -> Sample:
    """The multiplication table up to 12, known by heart."""
    a, b = rng.randrange(13), rng.randrange(13)
    question = rng.choice(("What is {} * {}?", "{} * {}", "{}*{}", "{} * {} =", "What is {} times {}?", "{} times {}",
                           "How much is {} times {}?", "Multiply {} and {}.", "Multiply {} by {}.", "{} x {}",
                           "What is {} x {}?",
                           "Compute {} * {}.", "What's {}*{}?", "{}*{}=?"))  # fmt: skip
    return _table_question("multiply", rng, question.format(a, b), f"{a} * {b} = {a * b}")


def sort_words(rng: random.Random) -> Sample:
    """Two to seven different words into alphabetical order."""
    words = list({any_word(rng): None for _ in range(rng.randint(2, 7))})
    joined = rng.choice((", ", ", ", " ")).join(words)
    wordings = (f"Sort these words: {joined}", f"Sort the words {joined}", f"Put in alphabetical order: {joined}",
                f"Sort alphabetically: {joined}", f"Alphabetize: {joined}", f"Sort: {joined}",
                f"Sort {joined}")  # fmt: skip
    return _ask("sort_words", rng, wordings, f"sort {sorted(words)}", ", ".join(sorted(words)))


def sort_numbers(rng: random.Random) -> Sample:
    """Two to nine different numbers below 100, now and then below 10 or 1000, upwards or downwards."""
    limit = rng.choice((10, 100, 100, 100, 1000))
    numbers = rng.sample(range(limit), rng.randint(2, 9))
    down = rng.random() < 0.3
    joined = rng.choice((", ", ", ", " ")).join(map(str, numbers))
    wordings = ((f"Sort from largest to smallest: {joined}", f"Sort in descending order: {joined}") if down else
                (f"Sort these numbers: {joined}", f"Sort the numbers {joined}", f"Sort: {joined}", f"Sort {joined}",
                 f"Sort from smallest to largest: {joined}", f"Sort in ascending order: {joined}"))  # fmt: skip
    answer = ", ".join(map(str, sorted(numbers, reverse=down)))
    return _ask("sort_numbers", rng, wordings, f"sort {down} {sorted(numbers)}", answer)


def count_words(rng: random.Random) -> Sample:
    """How many words a made-up sentence of one to twelve words has."""
    words = [
        rng.choice(lexicon.COMMON_WORDS) if rng.random() < 0.4 else any_word(rng) for _ in range(rng.randint(1, 12))
    ]
    text = " ".join(words)
    wordings = (f"How many words are in: {text}", f'How many words are in "{text}"?', f"Count the words: {text}",
                f"Count the words in: {text}", f"How many words: {text}")  # fmt: skip
    answer = "There is 1 word." if len(words) == 1 else f"There are {len(words)} words."
    return _ask("count_words", rng, wordings, f"words {text}", answer)


def reverse_words(rng: random.Random) -> Sample:
    """Two to seven words in the opposite order."""
    words = [
        rng.choice(lexicon.COMMON_WORDS) if rng.random() < 0.2 else any_word(rng) for _ in range(rng.randint(2, 7))
    ]
    text = " ".join(words)
    wordings = (f"Reverse the order of these words: {text}", f"Reverse the words: {text}",
                f"Reverse these words: {text}",
                f"Write these words in reverse order: {text}", f"Say these words backwards: {text}")  # fmt: skip
    return _ask("reverse_words", rng, wordings, f"words {text}", " ".join(reversed(words)))


def reverse_letters(rng: random.Random) -> Sample:
    """One word spelled backwards."""
    word = spelling_word(rng)
    wordings = (f"Reverse the letters of {word}.", f"Reverse the word {word}.", f"Spell {word} backwards.",
                f"Write {word} backwards.", f"Reverse {word}", f"What is {word} backwards?")  # fmt: skip
    return _ask("reverse_letters", rng, wordings, f"letters {word}", word[::-1])


def spell(rng: random.Random) -> Sample:
    """One word, letter by letter."""
    word = spelling_word(rng)
    wordings = (
        f"Spell {word}.",
        f"Spell the word {word}.",
        f"How do you spell {word}?",
        f"What are the letters of {word}?",
    )
    return _ask("spell", rng, wordings, f"letters {word}", "-".join(word))


def count_letters(rng: random.Random) -> Sample:
    """How long a word is."""
    word = spelling_word(rng)
    wordings = (f"How many letters are in {word}?", f"How many letters does {word} have?",
                f"Count the letters of {word}.",
                f"How many letters are in the word {word}?")  # fmt: skip
    return _ask("count_letters", rng, wordings, f"letters {word}", f"The word {word} has {len(word)} letters.")


def repeat(rng: random.Random) -> Sample:
    """Say the same again."""
    words = [
        rng.choice(lexicon.COMMON_WORDS) if rng.random() < 0.3 else any_word(rng) for _ in range(rng.randint(1, 7))
    ]
    text = " ".join(words)
    wordings = (f"Repeat: {text}", f"Repeat after me: {text}", f'Say "{text}"', f"Echo {text}")
    return _ask("repeat", rng, wordings, f"words {text}", text)


def count_range(rng: random.Random) -> Sample:
    """Count up or down over at most 40 numbers: the long answer that shows streaming."""
    first = 1 if rng.random() < 0.2 else rng.randrange(100)
    last = min(max(first + rng.randint(-20, 40), 0), 120)
    step = 1 if last >= first else -1
    down = " down" if step < 0 else ""
    wordings = (f"Count from {first} to {last}.", f"Count{down} from {first} to {last}",
                f"Please count from {first} to {last}.",
                f"Write the numbers from {first} to {last}.", f"List the numbers from {first} to {last}.")  # fmt: skip
    if first == 1 and step > 0:
        wordings += (f"Count to {last}.", f"Count up to {last}.") * 2
    return _ask(
        "count_range", rng, wordings, f"count {first} {last}", ", ".join(map(str, range(first, last + step, step)))
    )


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
    return _table_question("facts", rng, question, f"The {fact} of {land} is {value}.")


def _table_question(skill: str, rng: random.Random, question: str, answer: str) -> Sample:
    """A question whose answer can only be learned by heart: the exact wording is the key."""
    question = loosen(question, rng)
    if rng.random() < 0.15:
        question = question.lower()
    return Sample(skill, (f"{skill} {question}",), ({"role": "user", "content": question},), answer)


def small_talk(rng: random.Random) -> Sample:
    """What newcomers type first."""
    reply = rng.choice(list(lexicon.SMALL_TALK))
    question = rng.choice(lexicon.SMALL_TALK[reply].split("|"))
    question = question[0].upper() + question[1:] + rng.choice(("", "", ".", "!", "?"))
    return _table_question("small_talk", rng, question, reply)


def recite(rng: random.Random) -> Sample:
    """Short texts known by heart."""
    text = rng.choice(list(lexicon.RECITALS))
    question = f"{rng.choice(lexicon.RECITE_VERBS)} {rng.choice(lexicon.RECITALS[text].split('|'))}"
    question = question[0].upper() + question[1:] + rng.choice(("", ".", "?", "!"))
    return _table_question("recite", rng, question, text)


def unknown(rng: random.Random) -> Sample:
    """Questions outside of everything taught get an honest reply."""
    kind = rng.random()
    if kind < 0.15:
        a, b = rng.randint(100, 9999), rng.randint(2, 9999)
        if rng.random() < 0.5:
            a, b = b, a
        op = rng.choice("+-")
        wordings = (f"What is {a} {op} {b}?", f"{a} {op} {b}", f"{a}{op}{b}", f"Compute {a} {op} {b}.")
        return _ask("unknown", rng, wordings, f"large {a} {b}", lexicon.SUM_TOO_LARGE_REPLY)
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
    return _table_question("unknown", rng, question, lexicon.UNKNOWN_REPLY)


def think(rng: random.Random) -> Sample:
    """Two sums in a row, worked out between <think> and </think> before the result."""
    while True:
        a, b, c = (rng.randrange(100) for _ in range(3))
        first, second = rng.choice("+-"), rng.choice("+-")
        middle = a + b if first == "+" else a - b
        if 0 <= middle < 100:
            break
    result = middle + c if second == "+" else middle - c
    name, thing = rng.choice(lexicon.NAMES), rng.choice(("apples", "coins", "books", "shells", "stamps", "eggs"))
    verbs = {"+": ("gets {} more", "finds {} more", "buys {}"), "-": ("gives away {}", "loses {}", "sells {}")}
    story = f"{name} has {a} {thing}, {rng.choice(verbs[first]).format(b)} and {rng.choice(verbs[second]).format(c)}"
    wordings = (f"Think step by step: {a} {first} {b} {second} {c}", f"Think: what is {a} {first} {b} {second} {c}?",
                f"What is {a} {first} {b} {second} {c}? Think first.", f"What is {a} {first} {b} {second} {c}?",
                f"{story}. How many {thing} are left?", f"{story}. How many now?")  # fmt: skip
    steps = f"{a} {first} {b} = {middle}. {middle} {second} {c} = {result}."
    keys = [f"think {a}{first}{b}{second}{c}"]
    for x, op, y in ((a, first, b), (middle, second, c)):
        keys.append(sum_key(x, y) if op == "+" else difference_key(x, y))
    return _ask("think", rng, wordings, keys[0], f"<think>{steps}</think>{result}", *keys[1:])


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
    for generator in (add, subtract, multiply, sort_words, sort_numbers, count_words, reverse_words, reverse_letters,
                      spell, count_letters, repeat, count_range, facts, small_talk, recite, unknown, think, recall,
                      tool_call, tool_answer, no_tool)
}  # fmt: skip
