"""Words to ask about: known ones, and ones that need not exist, so that spelling is learned and not the word list."""

import random

from . import lexicon

BROAD_WORDS = sorted(
    {
        *lexicon.WORDS,
        *lexicon.TOPICS,
        *lexicon.COMMON_WORDS,
        *(name.lower() for name in lexicon.NAMES),
        *(city.lower() for city in lexicon.CITIES),
    }
)


def invent_word(rng: random.Random, num_letters: int) -> str:
    """Consonants and vowels in turn."""
    letters = ("bcdfghjklmnprstvwz", "aeiouy")
    start = rng.randrange(2)
    return "".join(rng.choice(letters[(start + i) % 2]) for i in range(num_letters))


def splice_word(rng: random.Random) -> str:
    """The start of one word and the end of another, as in "lanket"; the same letters fall into ever new tokens."""
    first, second = rng.choice(BROAD_WORDS), rng.choice(BROAD_WORDS)
    word = first[: rng.randint(1, len(first))] + second[rng.randrange(len(second)) :]
    return word[:10]


def any_word(rng: random.Random) -> str:
    """A word of the word list half of the time."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(lexicon.WORDS)
    return splice_word(rng) if kind < 0.75 else invent_word(rng, rng.randint(3, 8))


def spelling_word(rng: random.Random) -> str:
    """A word for the skills that look into words: mostly spliced, sometimes any letters at all."""
    kind = rng.random()
    if kind < 0.6:
        return splice_word(rng)
    if kind < 0.7:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 7)))
    return rng.choice(BROAD_WORDS) if kind < 0.85 else invent_word(rng, rng.randint(3, 8))
