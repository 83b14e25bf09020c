"""Detokenizers: token ids to text as they arrive, never half a character. Stop strings: see sequence_text.py."""

import codecs

from eprt.engine.tokenizer import Tokenizer


class ByteDetokenizer:
    """For byte-level tokenizers (DeepSeek's): the bytes of the tokens through an incremental UTF-8 decoder. Exact."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add_token(self, token_id: int) -> str:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any tokenizer: decodes a short window twice, without and with the new token, and takes the difference.

    The window begins at an earlier token because decoders look at neighbours (leading spaces, byte fallback). A text
    that ends in U+FFFD may be half a character: it waits for the next token, up to four tokens (UTF-8's longest).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._num_shown = 0

    def add_token(self, token_id: int) -> str:
        self._ids.append(token_id)
        with_new = self._decode(self._ids)
        if with_new.endswith("\N{REPLACEMENT CHARACTER}") and len(self._ids) - self._num_shown < 4:
            return ""
        return self._new_part(with_new)

    def _new_part(self, with_new: str) -> str:
        shown = self._decode(self._ids[: self._num_shown])
        # The next window begins with the tokens just shown: enough context for the next difference.
        del self._ids[: self._num_shown]
        self._num_shown = len(self._ids)
        return with_new[len(shown) :]

    def finish(self) -> str:
        return self._new_part(self._decode(self._ids)) if len(self._ids) > self._num_shown else ""


def new_detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> ByteDetokenizer | WindowDetokenizer:
    """For one completion. The joined results of add_token() and finish() equal Tokenizer.decode of all ids."""
    kind = ByteDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, skip_special_tokens)
