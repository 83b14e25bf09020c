"""Request: one sequence on its way through the engine. RequestLimits: what a rank can run, checked before queueing.

Imports no torch, so that the process that serves HTTP can refuse a bad request without asking a rank. Knows nothing of
text or of other requests.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from eprt.engine.outputs import PromptLogprob, TokenOutput
from eprt.engine.sampling_params import SamplingParams


class QueueFullError(RuntimeError):
    """There is no room to queue another request; the client should come back later."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What every request of a rank must respect."""

    vocab_size: int
    max_model_len: int  # most tokens of prompt and completion together
    kv_tokens: int  # tokens for which one rank's KV cache has room; where that bounds max_model_len, messages say so

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises ValueError, naming the numbers, for a request that can never run."""
        if not prompt_token_ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        self._check_vocab("prompt token", prompt_token_ids)
        self._check_vocab("stop_token_ids: token", params.stop_token_ids)
        self._check_vocab("logit_bias: token", params.logit_bias)
        self._check_vocab("allowed_token_ids: token", params.allowed_token_ids)
        self._check_vocab("bad_words: token", [token_id for word in params.bad_word_ids for token_id in word])
        if params.bad_words and not params.bad_word_ids:
            raise ValueError("bad_words: they are texts, which the engine cannot read; give their bad_word_ids")
        room = 1 if params.max_tokens else 0
        if len(prompt_token_ids) + room > self.max_model_len:
            bound = f"the KV cache holds {self.kv_tokens} tokens; raise --kv-cache-gb"
            if self.kv_tokens > self.max_model_len:
                bound = "shorten the prompt or raise --max-model-len"
            raise ValueError(
                f"the prompt has {len(prompt_token_ids)} tokens; with at least {room} generated it exceeds "
                f"max_model_len {self.max_model_len} ({bound})"
            )

    def check_generated(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, generated: Sequence[int]
    ) -> None:
        """As check(), of a request that has tokens already: more must be able to follow."""
        self._check_vocab("generated token", generated)
        room = min(params.max_tokens, self.max_model_len - len(prompt_token_ids))
        if generated and len(generated) >= room:
            raise ValueError(f"{len(generated)} tokens are generated already, and no more than {room} may be")

    def _check_vocab(self, what: str, token_ids) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            bad = next(t for t in token_ids if not 0 <= t < self.vocab_size)
            raise ValueError(f"{what} {bad} is outside the vocabulary 0..{self.vocab_size - 1}")


@dataclass(slots=True, eq=False)
class Request:
    """A sequence and its state. Only the scheduler changes it."""

    request_id: str
    tokens_L: np.ndarray  # int32, prompt and generated, when it was last queued; while it runs they are in BatchRows
    num_prompt: int
    params: SamplingParams
    sample_idx: int
    seed: int  # 64 bits; with sample_idx and the output position it determines every random draw
    max_len: int  # number of tokens at which it ends with "length"
    stop_ids: frozenset[int]  # token ids that end it
    row: int = -1  # its row in BatchRows, -1 unless it runs
    pages: list[int] = field(default_factory=list)  # of its tokens, in order
    tail: list[int] = field(default_factory=list)  # further pages, of models whose cache has such (request_pages.py)
    takeover: tuple[int, ...] = ()  # pages of the bookmark that its first step goes on from
    bookmarks: dict[int, list[int]] = field(default_factory=dict)  # by position: pages that the prefix cache lacks yet
    num_prefilled: int = 0  # tokens whose KV entries prefill has written, up to prefill_end
    prefill_end: int = 0
    decoding: bool = False  # then all tokens but the last have KV entries
    num_registered: int = 0  # full pages that the prefix cache knows (kv_cache.py)
    prefix_node: int = 0  # of the last of these
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache at its first admission
    arrived_s: float = field(default_factory=time.monotonic)
    queued_s: float = 0.0  # from its arrival to its first admission
    prompt_logprobs: list[PromptLogprob] | None = None  # so far; None: not wanted
    # max_len is that of the next token: with it the request goes to another instance, and its pages are held for that.
    hands_over: bool = False
    # Puts what the calling thread does behind the step that has filled its pages (ReadableCache.after_steps).
    await_entries: Callable[[], None] | None = None
    # A step has computed it without experts that were lost: its outputs say so, and no other request may use what such
    # steps left in its pages.
    lacked_experts: bool = False
    has_own_entries: bool = False
    grammar: Any = None  # what matchers of params.structured_outputs are copied from (grammars.py); None: without

    def note_missing_experts(self) -> None:
        """The step that is being scheduled computes it without some experts."""
        self.lacked_experts = self.has_own_entries = True

    @property
    def priority(self) -> int:
        """As in SamplingParams."""
        return self.params.priority

    def why_no_token(self) -> str:
        """Why no token was found behind tokens_L, whose last one stands for that."""
        position = len(self.tokens_L) - 1 - self.num_prompt
        if self.grammar is None:
            return f"the model's logits at output position {position} are not numbers"
        return (
            f"no token can follow at output position {position}: other fields forbid what the grammar allows, or it "
            "exceeds its limits there, or the model's logits are not numbers"
        )

    def last_output(self, output: TokenOutput, reason: str) -> TokenOutput:
        """The output that ends the request: it carries no token where none was found, or none is wanted. reason: as
        TokenOutput has it."""
        if output.token_id >= 0 and self.params.max_tokens:
            return msgspec.structs.replace(output, finish_reason=reason)
        reason, error = "length", None
        if output.token_id < 0:
            reason, error = "abort", self.why_no_token()
        no_token = {"token_id": -1, "logprob": None, "top_logprobs": ()}
        return msgspec.structs.replace(output, **no_token, finish_reason=reason, error=error)

    @classmethod
    def new(
        cls,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        sample_idx: int,
        seed: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        generated: Sequence[int] = (),
        hands_over: bool = False,
    ) -> "Request":
        """generated: tokens that it has already, from another rank; then its prompt's log-probabilities are known.
        hands_over: after one more token it goes on in another instance, unless that token ends it."""
        num_prompt = len(prompt_token_ids)
        max_len, next_len = min(num_prompt + params.max_tokens, max_model_len), num_prompt + len(generated) + 1
        hands_over &= next_len < max_len
        # Where a grammar is complete, nothing but EOS may follow, so that ends the request in any case.
        ends_by_eos = not params.ignore_eos or params.structured_outputs is not None
        return cls(
            request_id=request_id,
            tokens_L=np.array([*prompt_token_ids, *generated], dtype=np.int32),
            num_prompt=num_prompt,
            params=params,
            sample_idx=sample_idx,
            seed=seed & 0xFFFF_FFFF_FFFF_FFFF,
            max_len=next_len if hands_over else max_len,
            stop_ids=frozenset((*params.stop_token_ids, *(eos_token_ids if ends_by_eos else ()))),
            prompt_logprobs=[] if params.num_prompt_logprobs is not None and not generated else None,
            hands_over=hands_over,
        )
