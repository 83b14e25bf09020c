"""SequenceText: the text of one sequence as the engine's outputs arrive, cut at stop strings that cross tokens.

Knows nothing of log-probabilities, of other sequences, or of how an answer is written.
"""

from eprt.engine.detokenizer import Detokenizer, new_detokenizer
from eprt.engine.outputs import TokenOutput
from eprt.engine.tokenizer import Tokenizer


class SequenceText:
    """Token outputs in, text out; says why the sequence has ended. Without a tokenizer the text stays empty."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]):
        self._text = StoppableText(new_detokenizer(tokenizer), stop) if tokenizer else None
        self.finish_reason: str | None = None  # None while the sequence runs

    @property
    def is_decoded(self) -> bool:
        """Whether there is a tokenizer."""
        return self._text is not None

    @property
    def num_decoded(self) -> int:
        """Characters so far, including those that are withheld."""
        return self._text.num_decoded if self._text else 0

    def add_output(self, output: TokenOutput) -> str:
        """The text that can be shown now. Sets finish_reason when the engine or a stop string ends the sequence."""
        self.finish_reason = output.finish_reason
        if self._text is None:
            return ""
        # A token that ends a sequence with "stop" is EOS or a stop token: it belongs to the token ids, not to the text.
        is_text = output.token_id >= 0 and output.finish_reason != "stop"
        shown = self._text.add_tokens([output.token_id]) if is_text else ""
        if output.finish_reason is not None:
            shown += self._text.finish()
        if self._text.stopped:
            self.finish_reason = "stop"
        return shown


class StoppableText:
    """Text that a stop string ends: `stopped` turns true; neither the stop string nor what follows is shown.

    Text that could be the beginning of a stop string is withheld until the next tokens decide.
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...] = ()):
        self._detokenizer, self._stop, self._withheld = detokenizer, stop, ""
        self.stopped = False
        self.num_decoded = 0  # characters, shown or not

    def add_tokens(self, token_ids: list[int]) -> str:
        return "" if self.stopped else self._add_text("".join(map(self._detokenizer.add_token, token_ids)))

    def finish(self) -> str:
        """What was withheld; called once, after the last token."""
        if self.stopped:
            return ""
        text = self._add_text(self._detokenizer.finish())
        if not self.stopped:
            text, self._withheld = text + self._withheld, ""
        return text

    def _add_text(self, new: str) -> str:
        self.num_decoded += len(new)
        if not self._stop:
            return new
        text = self._withheld + new
        # The match that ends first, and of those the longest: the result does not depend on how tokens cut the text.
        hits = [(begin + len(s), begin) for s in self._stop if (begin := text.find(s)) >= 0]
        if hits:
            self.stopped, self._withheld = True, ""
            return text[: min(hits)[1]]
        shown = len(text) - max(overlap(text, s) for s in self._stop)
        self._withheld = text[shown:]
        return text[:shown]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, shorter than `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
