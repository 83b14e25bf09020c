"""Log-probabilities as OpenAI's two endpoints write them. Knows nothing of how they are collected (choice.py)."""

from typing import Any

from eprt.engine.tokenizer import Tokenizer
from eprt.serve.openai.choice import LogprobEntry

# JSON has no minus infinity; OpenAI's API writes this instead.
_LOWEST_LOGPROB = -9999.0


class LogprobWriter:
    """Entries to the `logprobs` of a choice. tokenizer: None where clients get token ids alone."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def _text(self, token_id: int) -> str:
        """The token as text; a part of a character as "bytes:\\xe2\\x80", so that different tokens stay different."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def completion(self, entries: list[LogprobEntry]) -> dict[str, Any]:
        """Of /v1/completions: four parallel lists. top_logprobs always has the chosen token too, as in OpenAI's API."""
        tops: list[dict[str, float] | None] = []
        for entry in entries:
            if entry.logprob is None:
                tops.append(None)
                continue
            top = {self._text(token_id): _finite(logprob) for token_id, logprob in entry.top}
            top.setdefault(self._text(entry.token_id), _finite(entry.logprob))
            tops.append(top)
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": [entry.offset for entry in entries],
        }

    def chat(self, entries: list[LogprobEntry]) -> dict[str, Any]:
        """Of /v1/chat/completions."""
        content = [
            {
                **self._chat_token(entry.token_id, entry.logprob or 0.0),
                "top_logprobs": [self._chat_token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = list(self._tokenizer.token_bytes(token_id)) if self._tokenizer else None
        return {"token": self._text(token_id), "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
