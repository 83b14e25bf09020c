"""Tokenization: text or messages to token ids and back, as vLLM's /tokenize and /detokenize answer.

Messages are read and rendered as /v1/chat/completions does, so the count is that of the same request there. A prompt
may be longer than the model takes: clients ask in order to shorten it. Knows nothing of HTTP.
"""

from typing import Any

import msgspec

from eprt.engine.request import RequestLimits
from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import ApiError, invalid, quoted
from eprt.serve.openai.parsing import OF_GENERATION, decode_body, parse_chat, parse_struct
from eprt.serve.openai.prepare import Preparer
from eprt.serve.openai.protocol import Int


class _HowToTokenize(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of /tokenize beside what is tokenized."""

    add_special_tokens: bool | None = None  # None: for a prompt; templates write theirs themselves
    return_token_strs: bool | None = None


class TokenizeRequest(_HowToTokenize, kw_only=True, frozen=True):
    """The body of POST /tokenize with a prompt."""

    prompt: str
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The body of POST /detokenize."""

    tokens: list[Int]
    model: str | None = None


class Tokenization:
    """The answers for one model."""

    def __init__(self, preparer: Preparer):
        self._preparer = preparer

    def tokenize(self, body: bytes, limits: RequestLimits) -> dict[str, Any]:
        """Raises ApiError."""
        raw = decode_body(body)
        tokenizer = self._tokenizer()
        if isinstance(raw, dict) and raw.get("messages") is not None:
            if raw.get("prompt") is not None:
                raise invalid("prompt", "the body has prompt and messages; send one of them")
            own = {name: raw.pop(name) for name in _HowToTokenize.__struct_fields__ if name in raw}
            how: _HowToTokenize = parse_struct(own, _HowToTokenize)
            chat = parse_chat(msgspec.json.encode(raw))
            self._preparer.check_model(chat.model)
            text, adds_special = self._preparer.render_chat(chat), bool(how.add_special_tokens)
        else:
            request = how = parse_struct(raw, TokenizeRequest, OF_GENERATION)
            self._preparer.check_model(request.model)
            text, adds_special = request.prompt, request.add_special_tokens is not False
        token_ids = tokenizer.encode(text, add_special_tokens=adds_special)
        strings = [tokenizer.token_name(token_id) for token_id in token_ids] if how.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": limits.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }

    def detokenize(self, body: bytes, limits: RequestLimits) -> dict[str, Any]:
        """Raises ApiError."""
        request = parse_struct(decode_body(body), DetokenizeRequest)
        self._preparer.check_model(request.model)
        for i, token_id in enumerate(request.tokens):
            if not 0 <= token_id < limits.vocab_size:
                what = f"tokens[{i}]={quoted(token_id)} is outside the vocabulary 0..{limits.vocab_size - 1}"
                raise invalid(f"tokens[{i}]", what)
        return {"prompt": self._tokenizer().decode(request.tokens, skip_special_tokens=False)}

    def _tokenizer(self) -> Tokenizer:
        if self._preparer.tokenizer is None:
            message = "the server runs without a tokenizer (--skip-tokenizer-init)"
            raise ApiError(400, message, code="unsupported_endpoint")
        return self._preparer.tokenizer
