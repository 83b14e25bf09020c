"""Grammars in Lark's syntax, as llguidance reads it, of texts that special tokens mark: tool calls, and thoughts that
come before an answer.

A special token is written by its id, as no text stands for it. Knows nothing of how grammars are compiled (grammars.py)
or of a model's marks.
"""

import json
import re
from collections.abc import Mapping

from eprt.engine.structured_outputs import FramedCalls

# Where a grammar of several parts has its form.
FORM = "form"

# Where a text can go on in one way only, llguidance allows but the token that its tokenizer would choose for that text.
# Not so here: a token may follow if its text fits, so that a mask says no more than a question about one token. Masks
# take a third less time that way.
_EVERY_SPELLING = '%llguidance {"no_forcing": true}'


def text_before(mark: str | None, special: Mapping[str, int]) -> str:
    """The grammar named FORM, behind any text up to the mark. special: text -> id of the special tokens.

    mark: None: no text comes before."""
    if mark is None:
        return f"{_EVERY_SPELLING}\nstart: @{FORM}"
    rule, terminals = _up_to(mark, special)
    return f"{_EVERY_SPELLING}\nstart: before @{FORM}\nbefore{rule}\n{terminals}"


def framed_calls(calls: FramedCalls, special: Mapping[str, int]) -> str:
    """Calls, with free text before them unless they are required."""
    frames = [(_literal(begin, special), _literal(end, special)) for begin, _, end in calls.frames]
    mark = calls.section_begin or _common_prefix([begin for begin, _, _ in calls.frames])
    more = f" ({_literal(calls.between, special)} call)*" if calls.many else ""
    rules = [
        f"calls: {_literal(calls.section_begin, special)} call{more} {_literal(calls.section_end, special)}",
        "call: " + " | ".join(f"c{i}" for i in range(len(frames))),
        *(f"c{i}: {begin} a{i} {end}" for i, (begin, end) in enumerate(frames)),
        *(f"a{i}: %json {schema}" for i, (_, schema, _) in enumerate(calls.frames)),
    ]
    if calls.required:
        return "\n".join(["start: calls", *rules])
    allowed = [special[text] for text in calls.in_text if text in special]
    if any(mark.startswith(text) for text in special):
        tokens = f" | <{json.dumps(sorted(allowed)).replace(' ', '')}>" if allowed else ""
        return "\n".join(["start: free calls?", f"free: (TEXT{tokens})*", r"TEXT: /(.|\n)+/", *rules])
    # The mark is plain text, behind which one of the calls must follow: it is taken off their beginnings.
    rest = [(_literal(begin.removeprefix(mark), special), end) for (begin, _, _), (_, end) in zip(calls.frames, frames)]
    section = calls.section_begin
    if not section:
        rules[2 : 2 + len(rest)] = [f"c{i}: {_literal(mark, special)} b{i}" for i in range(len(rest))]
        rules += [f"b{i}: {begin} a{i} {end}" for i, (begin, end) in enumerate(rest)]
        rules += ["first: " + " | ".join(f"b{i}" for i in range(len(rest)))]
        behind = f"first{more}"
    else:
        behind = f"call{more} {_literal(calls.section_end, special)}"
    escaped = _pattern(mark)
    return "\n".join(
        [
            f"start: FREE | before {behind}",
            rf"FREE: /(.|\n)*/ & ~/(.|\n)*{escaped}(.|\n)*/",
            rf"before[suffix={json.dumps(mark)}]: /(.|\n)*/",
            *rules,
        ]
    )


def _up_to(mark: str, special: Mapping[str, int]) -> tuple[str, str]:
    if mark in special:
        return f": TEXT? <[{special[mark]}]>", r"TEXT: /(.|\n)+/"
    return rf"[suffix={json.dumps(mark)}]: /(.|\n)*/", ""


def _literal(text: str, special: Mapping[str, int]) -> str:
    """The text as the model writes it: its special tokens by their ids."""
    if not text:
        return '""'
    marks = sorted((mark for mark in special if mark in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def _common_prefix(texts: list[str]) -> str:
    shortest, longest = min(texts), max(texts)
    for i, character in enumerate(shortest):
        if longest[i] != character:
            return shortest[:i]
    return shortest


def _pattern(text: str) -> str:
    """For a regular expression between slashes."""
    return "".join(f"\\u{{{ord(character):x}}}" if not character.isalnum() else character for character in text)
