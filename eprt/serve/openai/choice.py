"""Choice: one sequence's tokens become its text, reasoning, tool calls and log-probabilities, in pieces or at once.

The rule for every piece: token_ids and logprobs cover each generated token, an ending EOS or stop token included; text
covers neither those nor special tokens, and ends before a stop string. Knows nothing of how an API writes them
(writers.py, logprobs.py).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from eprt.engine.detokenizer import new_detokenizer
from eprt.engine.outputs import PromptLogprob, TokenOutput
from eprt.engine.sequence_text import SequenceText
from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import ApiError
from eprt.serve.openai.job import GenerationJob
from eprt.serve.openai.reasoning import ReasoningParser
from eprt.serve.openai.tools import CallDelta, ToolCallParser

TopLogprobs = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One token with its log-probability."""

    token_id: int
    logprob: float | None  # None for the first token of a prompt
    top: TopLogprobs  # (token id, logprob) of the likeliest tokens
    offset: int  # in the choice's text, at which the token's text begins


@dataclass(slots=True)
class Delta:
    """What a choice has gained since the previous delta."""

    text: str = ""  # of the answer
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[LogprobEntry] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)  # one per call
    finish_reason: str | None = None
    is_first: bool = False

    def add_calls(self, calls: list[CallDelta]) -> None:
        for call in calls:
            if self.calls and self.calls[-1].number == call.number:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)


class Choice:
    """One sequence of a response.

    Args:
        index: among the choices of the response.
        job: the request.
        echo: text of the prompt with which the choice begins; None: without.
    """

    def __init__(
        self,
        index: int,
        prompt_token_ids: list[int],
        job: GenerationJob,
        tokenizer: Tokenizer | None,
        *,
        echo: str | None = None,
    ):
        params, formats = job.params, job.formats
        self.index, self.prompt_token_ids = index, prompt_token_ids
        self.num_tokens = self.num_cached_tokens = 0
        self.finish_reason: str | None = None  # None while the sequence runs
        self.lacked_experts = False  # it was computed, in part, without experts that were lost
        self.prompt_logprobs: Sequence[PromptLogprob] = ()
        self._params, self._tokenizer, self._echo, self._formats = params, tokenizer, echo, formats
        self._text = SequenceText(tokenizer, params, keeps_special_tokens=formats.keeps_special_tokens)
        self._reasoning = self._tools = None
        if formats.reasoning is not None:
            self._reasoning = ReasoningParser(formats.reasoning, formats.begins_inside)
        if formats.tools is not None:
            self._tools = ToolCallParser(formats.tools, formats.properties, streams=job.stream)
        # Where each token's text begins, until the reasoning has ended.
        self._token_offsets: list[int] = []
        self._num_echoed = len(echo or "")
        self._delta = Delta(text=echo or "", is_first=True)

    def add_output(self, output: TokenOutput) -> None:
        """Adds one output to the current delta. Raises ApiError when the engine gave the sequence up."""
        if output.error is not None:
            raise ApiError(500, f"the engine gave the request up: {output.error}", code="engine_error")
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.lacked_experts |= output.lacked_experts
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.prompt_logprobs is not None and self._echo is not None and self._params.logprobs is not None:
            self._add_prompt_logprobs(output.prompt_logprobs)
        if output.token_id >= 0:
            self._add_token(output)
        self._read_text(self._text.add_output(output))
        if self._text.finish_reason is not None:
            self._finish(self._text.finish_reason)

    @property
    def has_news(self) -> bool:
        """Whether the current delta is worth a message of its own. What it has else waits for the next."""
        delta = self._delta
        is_empty = not (delta.text or delta.reasoning or delta.calls or delta.finish_reason or delta.is_first)
        return not (is_empty and self._formats.holds_back)

    @property
    def stop_string(self) -> str | None:
        """The one that ended the sequence."""
        return self._text.stop_string

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning, its mark included."""
        if self._reasoning is None:
            return 0
        if self._reasoning.is_inside:
            return len(self._token_offsets)
        return bisect_left(self._token_offsets, self._reasoning.num_read)

    def take_delta(self) -> Delta:
        """What has been gained since the last call."""
        delta, self._delta = self._delta, Delta()
        return delta

    def _add_token(self, output: TokenOutput) -> None:
        self.num_tokens += 1
        self._delta.token_ids.append(output.token_id)
        if self._reasoning is not None and not self._reasoning.is_answering:
            self._token_offsets.append(self._text.num_decoded)
        if self._params.logprobs is not None:
            offset = self._num_echoed + self._text.num_decoded
            self._delta.entries.append(LogprobEntry(output.token_id, output.logprob, output.top_logprobs, offset))

    def _add_prompt_logprobs(self, prompt_logprobs: Sequence[PromptLogprob]) -> None:
        logprobs: list[tuple[float | None, TopLogprobs]] = [(None, ()), *(of_token[:2] for of_token in prompt_logprobs)]
        widths = self._prompt_widths()
        # A BOS that the tokenizer put in front has a negative offset: the client's text begins behind it.
        offset = self._num_echoed - sum(widths)
        for token_id, (logprob, top), width in zip(self.prompt_token_ids, logprobs, widths):
            self._delta.entries.append(LogprobEntry(token_id, logprob, top[: self._params.logprobs], max(0, offset)))
            offset += width

    def _prompt_widths(self) -> list[int]:
        """Characters that each prompt token completes."""
        if self._tokenizer is None:
            return [0] * len(self.prompt_token_ids)
        detokenizer = new_detokenizer(self._tokenizer, skip_special_tokens=False)
        return [len(detokenizer.add_token(token_id)) for token_id in self.prompt_token_ids]

    def _finish(self, reason: str) -> None:
        if self._reasoning is not None:
            self._add_parts(*self._reasoning.finish())
        if self._tools is not None:
            self._add_answer(*self._tools.finish())
            if self._tools.num_calls and reason == "stop":
                reason = "tool_calls"
        self.finish_reason = self._delta.finish_reason = reason

    def _read_text(self, text: str) -> None:
        if self._reasoning is None:
            self._add_parts("", text)
        else:
            self._add_parts(*self._reasoning.add_text(text))

    def _add_parts(self, reasoning: str, text: str) -> None:
        if self._formats.shows_reasoning:
            self._delta.reasoning += reasoning
        self._add_answer(*self._tools.add_text(text) if self._tools else (text, []))

    def _add_answer(self, text: str, calls: list[CallDelta]) -> None:
        self._delta.text += text
        self._delta.add_calls(calls)
