"""Choice: one sequence's tokens become its text, log-probabilities and tool calls, in pieces or at once.

The rule for every piece: token_ids and logprobs cover each generated token, an ending EOS or stop token included; text
covers neither those nor special tokens, and ends before a stop string.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eprt.engine.detokenizer import IncrementalText
from eprt.engine.outputs import TokenOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import ApiError
from eprt.serve.openai.tools import Call, Format, ToolCallParser

# JSON has no minus infinity; OpenAI's API writes this instead.
_LOWEST_LOGPROB = -9999.0

TopLogprobs = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One token: its id, log-probability (None for the first of a prompt), the alternatives, where its text begins."""

    token_id: int
    logprob: float | None
    top: TopLogprobs
    offset: int


@dataclass(slots=True)
class Delta:
    """What a choice has gained since the last one. prompt_token_ids: on the first, where they were asked for."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[LogprobEntry] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None
    is_first: bool = False


class Choice:
    """index: among the choices of the response. echo: text of the prompt to begin with, None for none."""

    def __init__(
        self,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        echo: str | None = None,
        tool_format: Format | None = None,
    ):
        self.index, self.prompt_token_ids = index, prompt_token_ids
        self.num_tokens = self.num_cached_tokens = self.num_calls = 0
        self.finish_reason: str | None = None
        self._params, self._tokenizer, self._echo = params, tokenizer, echo
        self._text = IncrementalText(tokenizer.detokenizer(), params.stop) if tokenizer else None
        self._tools = ToolCallParser(tool_format) if tool_format else None
        self._num_echoed = len(echo or "")
        self._delta = Delta(text=echo or "", is_first=True)

    def take(self, output: TokenOutput) -> None:
        """Adds one output to the current delta. Raises ApiError when the engine gave the sequence up."""
        if output.error is not None:
            raise ApiError(500, f"the engine gave the request up: {output.error}", code="engine_error")
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None and self._echo is not None:
            self._take_prompt(output.prompt_logprobs)
        if output.token_id >= 0:
            self._take_token(output)
        if self._text is not None and self._text.stopped:
            self._finish("stop")
        elif output.finish_reason is not None:
            self._finish(output.finish_reason)

    def take_delta(self) -> Delta:
        """What has been gained since the last call."""
        delta, self._delta = self._delta, Delta()
        return delta

    def _take_token(self, output: TokenOutput) -> None:
        self.num_tokens += 1
        self._delta.token_ids.append(output.token_id)
        if self._params.logprobs is not None:
            offset = self._num_echoed + (self._text.num_decoded if self._text else 0)
            self._delta.entries.append(LogprobEntry(output.token_id, output.logprob, output.top_logprobs, offset))
        # "stop" from the engine: this token ended the sequence and is no part of the text.
        if self._text is not None and output.finish_reason != "stop":
            self._show(self._text.feed([output.token_id]))

    def _take_prompt(self, prompt_logprobs: Sequence[tuple[float, TopLogprobs]]) -> None:
        logprobs: list[tuple[float | None, TopLogprobs]] = [(None, ()), *prompt_logprobs]
        widths = self._prompt_widths()
        # A BOS that the tokenizer put before the client's text lies before its beginning.
        offset = self._num_echoed - sum(widths)
        for token_id, (logprob, top), width in zip(self.prompt_token_ids, logprobs, widths):
            self._delta.entries.append(LogprobEntry(token_id, logprob, top, max(0, offset)))
            offset += width

    def _prompt_widths(self) -> list[int]:
        """Characters that each prompt token completes."""
        if self._tokenizer is None:
            return [0] * len(self.prompt_token_ids)
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
        return [len(detokenizer.add(token_id)) for token_id in self.prompt_token_ids]

    def _finish(self, reason: str) -> None:
        if self._text is not None:
            self._show(self._text.finish())
            if self._text.stopped:
                reason = "stop"
        if self._tools is not None:
            text, calls = self._tools.finish()
            self._delta.text += text
            self._delta.calls += calls
            self.num_calls += len(calls)
            if self.num_calls and reason == "stop":
                reason = "tool_calls"
        self.finish_reason = self._delta.finish_reason = reason

    def _show(self, text: str) -> None:
        if self._tools is None:
            self._delta.text += text
            return
        shown, calls = self._tools.feed(text)
        self._delta.text += shown
        self._delta.calls += calls
        self.num_calls += len(calls)


class LogprobShapes:
    """Log-probabilities as the two endpoints write them."""

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
        """Four parallel lists. top_logprobs always has the chosen token too, as in OpenAI's API."""
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
