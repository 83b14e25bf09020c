"""Skills with numbers: sums, differences, the multiplication table, and two steps worked out before the result."""

import random

from . import lexicon
from .sample import Sample, ask, table_question


def sum_key(a: int, b: int) -> str:
    """Key of a + b, the same for b + a."""
    return f"sum {min(a, b)} {max(a, b)}"


def difference_key(a: int, b: int) -> str:
    """Key of a - b."""
    return f"difference {a} {b}"


def add(rng: random.Random) -> Sample:
    """Sums of two numbers below 100."""
    a, b = rng.randrange(100), rng.randrange(100)
    wordings = (
        f"What is {a} + {b}?",
        f"{a} + {b}",
        f"{a}+{b}",
        f"{a} + {b} =",
        f"Add {a} and {b}.",
        f"Compute {a} + {b}.",
        f"How much is {a} plus {b}?",
        f"What is {a} plus {b}?",
        f"What's {a}+{b}?",
        f"{a}+{b}=?",
    )
    return ask("add", rng, wordings, sum_key(a, b), f"{a} + {b} = {a + b}")


def subtract(rng: random.Random) -> Sample:
    """Differences of two numbers below 100; half of them are negative."""
    a, b = rng.randrange(100), rng.randrange(100)
    wordings = (
        f"What is {a} - {b}?",
        f"{a} - {b}",
        f"{a}-{b}",
        f"{a} - {b} =",
        f"Subtract {b} from {a}.",
        f"Compute {a} - {b}.",
        f"How much is {a} minus {b}?",
        f"What is {a} minus {b}?",
        f"{a}-{b}=?",
    )
    return ask("subtract", rng, wordings, difference_key(a, b), f"{a} - {b} = {a - b}")


def multiply(rng: random.Random) -> Sample:
    """The multiplication table up to 12, known by heart."""
    a, b = rng.randrange(13), rng.randrange(13)
    question = rng.choice(
        (
            "What is {} * {}?",
            "{} * {}",
            "{}*{}",
            "{} * {} =",
            "What is {} times {}?",
            "{} times {}",
            "How much is {} times {}?",
            "Multiply {} and {}.",
            "Multiply {} by {}.",
            "{} x {}",
            "What is {} x {}?",
            "Compute {} * {}.",
            "What's {}*{}?",
            "{}*{}=?",
        )
    )
    return table_question("multiply", rng, question.format(a, b), f"{a} * {b} = {a * b}")


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
    wordings = (
        f"Think step by step: {a} {first} {b} {second} {c}",
        f"Think: what is {a} {first} {b} {second} {c}?",
        f"What is {a} {first} {b} {second} {c}? Think first.",
        f"What is {a} {first} {b} {second} {c}?",
        f"{story}. How many {thing} are left?",
        f"{story}. How many now?",
    )
    steps = f"{a} {first} {b} = {middle}. {middle} {second} {c} = {result}."
    keys = [f"think {a}{first}{b}{second}{c}"]
    for x, op, y in ((a, first, b), (middle, second, c)):
        keys.append(sum_key(x, y) if op == "+" else difference_key(x, y))
    return ask("think", rng, wordings, keys[0], f"<think>{steps}</think>{result}", *keys[1:])
