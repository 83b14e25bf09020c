"""Tokenizer: text to token ids and back, from a Hugging Face directory (tokenizer.json, tokenizer_config.json).

Uses the `tokenizers` library alone: transformers takes seconds to import and is not needed to serve. Ids equal those of
transformers.AutoTokenizer (a test compares them). Knows nothing of text that arrives token by token (detokenizer.py).
"""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from eprt.models.config_file import ConfigFile

_MOST_TOKENS = 10_000_000  # some forty times as many as any model has
_LONGEST_ERROR = 400  # characters


class Tokenizer:
    """One checkpoint's tokenizer."""

    def __init__(self, model_dir: str | Path):
        model_dir = Path(model_dir)
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; the tokenizers library needs it")
        _check_ids(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises plain Exception; where it panics, not even that
            raise ValueError(f"{path}: {str(error)[:_LONGEST_ERROR]}") from None
        # Some checkpoints keep these settings from training; transformers ignores them too.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config: dict[str, Any] = _read_json(model_dir / "tokenizer_config.json")
        # name ("bos_token", ...) -> text, as chat templates expect them
        more = _read_json(model_dir / "special_tokens_map.json")
        try:
            self.special_tokens = _special_tokens(self.config, more)
            self._add_declared_tokens()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            where = model_dir / "tokenizer_config.json"
            raise ValueError(f"{where}: its tokens are not written as transformers does: {error!r:.200}") from None
        self._spec: dict[str, Any] = json.loads(self._tokenizer.to_str())
        decoder = self._spec.get("decoder") or {}
        decoder_kinds = [part["type"] for part in decoder.get("decoders", [decoder]) if part]
        self.is_byte_level = decoder_kinds == ["ByteLevel"]
        self._has_byte_fallback = "ByteFallback" in decoder_kinds
        self._special_ids = frozenset(t["id"] for t in self._spec.get("added_tokens", []) if t["special"])
        # transformers adds BOS where this says so, even where tokenizer.json does not (DeepSeek V3's).
        bos_id = self._tokenizer.token_to_id(self.special_tokens.get("bos_token", ""))
        self._forced_bos = [bos_id] if self.config.get("add_bos_token") and bos_id is not None else []

    def _add_declared_tokens(self) -> None:
        """Adds the tokens that the configuration has and tokenizer.json lacks, as transformers does: after the others,
        and with the next free ids where they are not words of the vocabulary."""
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        declared = sorted((self.config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
        tokens = [
            tokenizers.AddedToken(**{name: value for name, value in token.items() if name in _TOKEN_FIELDS})
            for _, token in declared
            if token["content"] not in added
        ]
        added.update(token.content for token in tokens)
        more = self.config.get("extra_special_tokens") or self.config.get("additional_special_tokens") or []
        more = more.values() if isinstance(more, dict) else more
        special = [*self.special_tokens.values(), *(t["content"] if isinstance(t, dict) else t for t in more)]
        tokens += [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(special)
            if text not in added
        ]
        if tokens:
            self._tokenizer.add_tokens(tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. add_special_tokens: with BOS where the checkpoint wants one; not for rendered chat templates,
        which write it themselves. ValueError for a text that has half of a surrogate pair, which is what Python makes
        of bytes on a command line that are not UTF-8."""
        if _HALF_PAIR.search(text):
            raise ValueError(f"{text[:80]!r} has half of a surrogate pair, which is not a character; is it UTF-8?")
        if len(text) < _LONG_TEXT:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:  # the library lets other threads run only here
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
        if add_special_tokens and ids[: len(self._forced_bos)] != self._forced_bos:
            ids = self._forced_bos + ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def longest_token(self) -> int | None:
        """Largest number of bytes of text that one token can stand for; None where there is no bound."""
        pieces = self._spec.get("pre_tokenizer") or {}
        pieces = pieces.get("pretokenizers", [pieces])
        keeps_all = all(p.get("type") in _KEEPING and p.get("behavior") != "Removed" for p in pieces)
        strips = any(token["lstrip"] or token["rstrip"] for token in self._spec.get("added_tokens", []))
        if not (self.is_byte_level and keeps_all) or strips or self._spec.get("normalizer"):
            return None
        return max((len(self.token_bytes(token_id)) for token_id in self._tokenizer.get_vocab().values()), default=None)

    @property
    def num_tokens(self) -> int:
        return self._tokenizer.get_vocab_size()

    @property
    def added_tokens(self) -> dict[str, int]:
        """Text and id of the tokens beside the vocabulary, special or not."""
        return {token["content"]: token["id"] for token in self._spec.get("added_tokens", [])}

    def to_json(self) -> str:
        """As tokenizer.json would have it, with the tokens that only the configuration declares."""
        return self._tokenizer.to_str()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens."""
        return tuple(token["content"] for token in self._spec.get("added_tokens", []) if token["special"])

    def has_token(self, text: str) -> bool:
        return self._tokenizer.token_to_id(text) is not None

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary writes it; "" for an id that it does not have."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, possibly a part of a character. Unknown ids stand for nothing."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            # As in the library: a token with a character outside the alphabet (an added token) stands for itself.
            try:
                return bytes(_BYTE_OF_CHARACTER[c] for c in token)
            except KeyError:
                return token.encode()
        if self._has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _check_ids(path: Path) -> None:
    """ValueError for an id beyond all measure: the library would allocate memory for all ids below it."""
    file = ConfigFile(path)
    vocab = file.section("model").fields.get("vocab")
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    ids += [token.get("id") for token in file.take("added_tokens", list, []) if isinstance(token, dict)]
    largest = max((token_id for token_id in ids if isinstance(token_id, int)), default=0)
    if largest >= _MOST_TOKENS:
        raise ValueError(f"{path}: token id {str(largest)[:30]}: must be below {_MOST_TOKENS}")


def _read_json(path: Path) -> dict[str, Any]:
    return ConfigFile(path).fields if path.is_file() else {}


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like; a token is written as text or as {"content": text, ...}. The first source wins."""
    found: dict[str, str] = {}
    for source in sources:
        for name, value in source.items():
            if isinstance(value, dict):
                value = value.get("content")
            if name.endswith("_token") and isinstance(value, str):
                found.setdefault(name, value)
    return found


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where printable, else 256, 257, ... in order.

    Source: GPT-2's bytes_to_unicode, which every byte-level tokenizer.json follows.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


# Pre-tokenizers that split a text and drop none of it, unless their behavior is "Removed".
_KEEPING = frozenset(("ByteLevel", "Digits", "Punctuation", "Split"))

_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

# From this many characters on, letting other threads run is worth its cost.
_LONG_TEXT = 10_000
_HALF_PAIR = re.compile("[\ud800-\udfff]")

_BYTE_OF_CHARACTER = _byte_alphabet()
