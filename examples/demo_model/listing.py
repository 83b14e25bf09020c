"""Skills with lists of words, letters and numbers: sort, count, reverse, spell, repeat."""

import random

from . import lexicon
from .sample import Sample, ask
from .words import any_word, spelling_word


def sort_words(rng: random.Random) -> Sample:
    """Two to seven different words into alphabetical order."""
    words = list({any_word(rng): None for _ in range(rng.randint(2, 7))})
    joined = rng.choice((", ", ", ", " ")).join(words)
    wordings = (
        f"Sort these words: {joined}",
        f"Sort the words {joined}",
        f"Put in alphabetical order: {joined}",
        f"Sort alphabetically: {joined}",
        f"Alphabetize: {joined}",
        f"Sort: {joined}",
        f"Sort {joined}",
    )
    return ask("sort_words", rng, wordings, f"sort {sorted(words)}", ", ".join(sorted(words)))


def sort_numbers(rng: random.Random) -> Sample:
    """Two to nine different numbers below 100, now and then below 10 or 1000, upwards or downwards."""
    limit = rng.choice((10, 100, 100, 100, 1000))
    numbers = rng.sample(range(limit), rng.randint(2, 9))
    down = rng.random() < 0.3
    joined = rng.choice((", ", ", ", " ")).join(map(str, numbers))
    wordings = (
        (f"Sort from largest to smallest: {joined}", f"Sort in descending order: {joined}")
        if down
        else (
            f"Sort these numbers: {joined}",
            f"Sort the numbers {joined}",
            f"Sort: {joined}",
            f"Sort {joined}",
            f"Sort from smallest to largest: {joined}",
            f"Sort in ascending order: {joined}",
        )
    )
    answer = ", ".join(map(str, sorted(numbers, reverse=down)))
    return ask("sort_numbers", rng, wordings, f"sort {down} {sorted(numbers)}", answer)


def count_words(rng: random.Random) -> Sample:
    """How many words a made-up sentence of one to twelve words has."""
    words = [
        rng.choice(lexicon.COMMON_WORDS) if rng.random() < 0.4 else any_word(rng) for _ in range(rng.randint(1, 12))
    ]
    text = " ".join(words)
    wordings = (
        f"How many words are in: {text}",
        f'How many words are in "{text}"?',
        f"Count the words: {text}",
        f"Count the words in: {text}",
        f"How many words: {text}",
    )
    answer = "There is 1 word." if len(words) == 1 else f"There are {len(words)} words."
    return ask("count_words", rng, wordings, f"words {text}", answer)


def reverse_words(rng: random.Random) -> Sample:
    """Two to seven words in the opposite order."""
    words = [
        rng.choice(lexicon.COMMON_WORDS) if rng.random() < 0.2 else any_word(rng) for _ in range(rng.randint(2, 7))
    ]
    text = " ".join(words)
    wordings = (
        f"Reverse the order of these words: {text}",
        f"Reverse the words: {text}",
        f"Reverse these words: {text}",
        f"Write these words in reverse order: {text}",
        f"Say these words backwards: {text}",
    )
    return ask("reverse_words", rng, wordings, f"words {text}", " ".join(reversed(words)))


def reverse_letters(rng: random.Random) -> Sample:
    """One word spelled backwards."""
    word = spelling_word(rng)
    wordings = (
        f"Reverse the letters of {word}.",
        f"Reverse the word {word}.",
        f"Spell {word} backwards.",
        f"Write {word} backwards.",
        f"Reverse {word}",
        f"What is {word} backwards?",
    )
    return ask("reverse_letters", rng, wordings, f"letters {word}", word[::-1])


def spell(rng: random.Random) -> Sample:
    """One word, letter by letter."""
    word = spelling_word(rng)
    wordings = (
        f"Spell {word}.",
        f"Spell the word {word}.",
        f"How do you spell {word}?",
        f"What are the letters of {word}?",
    )
    return ask("spell", rng, wordings, f"letters {word}", "-".join(word))


def count_letters(rng: random.Random) -> Sample:
    """How long a word is."""
    word = spelling_word(rng)
    wordings = (
        f"How many letters are in {word}?",
        f"How many letters does {word} have?",
        f"Count the letters of {word}.",
        f"How many letters are in the word {word}?",
    )
    return ask("count_letters", rng, wordings, f"letters {word}", f"The word {word} has {len(word)} letters.")


def repeat(rng: random.Random) -> Sample:
    """Say the same again."""
    words = [
        rng.choice(lexicon.COMMON_WORDS) if rng.random() < 0.3 else any_word(rng) for _ in range(rng.randint(1, 7))
    ]
    text = " ".join(words)
    wordings = (f"Repeat: {text}", f"Repeat after me: {text}", f'Say "{text}"', f"Echo {text}")
    return ask("repeat", rng, wordings, f"words {text}", text)


def count_range(rng: random.Random) -> Sample:
    """Count up or down over at most 40 numbers: the long answer that shows streaming."""
    first = 1 if rng.random() < 0.2 else rng.randrange(100)
    last = min(max(first + rng.randint(-20, 40), 0), 120)
    step = 1 if last >= first else -1
    down = " down" if step < 0 else ""
    wordings = (
        f"Count from {first} to {last}.",
        f"Count{down} from {first} to {last}",
        f"Please count from {first} to {last}.",
        f"Write the numbers from {first} to {last}.",
        f"List the numbers from {first} to {last}.",
    )
    if first == 1 and step > 0:
        wordings += (f"Count to {last}.", f"Count up to {last}.") * 2
    return ask(
        "count_range", rng, wordings, f"count {first} {last}", ", ".join(map(str, range(first, last + step, step)))
    )
