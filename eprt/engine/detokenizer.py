"""Token ids to text while they come: never half a character, and stop strings found across token boundaries.

text = IncrementalText(tokenizer.detokenizer(), stop=("END",))
text.feed([17, 4])   -> what may be shown now
text.finish()        -> what was held back; call it once, when the last token is in
"""

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from eprt.engine.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """One completion's decoder. The joined results of add() and finish() equal Tokenizer.decode of all ids."""

    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class ByteDetokenizer:
    """For byte-level tokenizers (DeepSeek's): the bytes of the tokens through an incremental UTF-8 decoder. Exact."""

    def __init__(self, tokenizer: "Tokenizer", skip_special_tokens: bool):
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any tokenizer: decodes a short window twice, without and with the new token, and takes the difference.

    The window begins at an earlier token because decoders look at their neighbours (leading spaces, byte fallback).
    A text that ends in U+FFFD may be half a character: it waits for the next token, at most four (UTF-8's longest).
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special_tokens: bool):
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._num_shown = 0

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        with_new = self._decode(self._ids)
        if with_new.endswith("\N{REPLACEMENT CHARACTER}") and len(self._ids) - self._num_shown < 4:
            return ""
        return self._show(with_new)

    def _show(self, with_new: str) -> str:
        shown = self._decode(self._ids[: self._num_shown])
        # The next window begins with the tokens just shown: enough context for the next difference.
        del self._ids[: self._num_shown]
        self._num_shown = len(self._ids)
        return with_new[len(shown) :]

    def finish(self) -> str:
        return self._show(self._decode(self._ids)) if len(self._ids) > self._num_shown else ""


class IncrementalText:
    """The text of one completion. A stop string ends it: `stopped` turns true; neither it nor what follows is shown.

    Text that could be the beginning of a stop string is held back until the next tokens decide.
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...] = ()):
        self._detokenizer, self._stop, self._held = detokenizer, stop, ""
        self.stopped = False
        self.num_decoded = 0  # characters, shown or not

    def feed(self, token_ids: list[int]) -> str:
        return "" if self.stopped else self._take("".join(map(self._detokenizer.add, token_ids)))

    def finish(self) -> str:
        if self.stopped:
            return ""
        text = self._take(self._detokenizer.finish())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _take(self, new: str) -> str:
        self.num_decoded += len(new)
        if not self._stop:
            return new
        text = self._held + new
        # The one that ends first, of those the longest: so it does not matter how the text is cut into tokens.
        hits = [(begin + len(s), begin) for s in self._stop if (begin := text.find(s)) >= 0]
        if hits:
            self.stopped, self._held = True, ""
            return text[: min(hits)[1]]
        num_held = max(overlap(text, s) for s in self._stop)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, shorter than it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
