"""Extended fields: what both endpoints take beyond sampling's usual fields: names of vLLM and SGLang, labels of OpenAI.

Knows nothing of tokens or ranks.
"""

import re
from typing import Annotated, Any, Literal

import msgspec

from eprt.serve.errors import ApiError, invalid, quoted, shortened, unsupported
from eprt.serve.openai.structured import StructuredFields

# Without bounds an integer of a thousand digits would reach code that computes with it.
Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_BAD_WORDS = 512  # the host looks at each of them in every step


class ExtendedFields(StructuredFields, kw_only=True, frozen=True):
    """None is "not given"."""

    # What may be generated.
    min_tokens: Int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Int] | None = None
    best_of: Int | None = None  # only as n
    # How tokens become text.
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # makes no difference: none are put there
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name of it
    # How text becomes tokens.
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None  # -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # what is left out; None: left
    # What the answer has.
    prompt_logprobs: Int | None = None
    return_tokens_as_token_ids: bool | None = None
    # How the request is run, and what it is called.
    priority: Int | None = None
    service_tier: str | None = None  # tiers/table.py
    prompt_cache_key: str | None = None
    session_id: str | None = None  # the same, as vLLM and SGLang call it
    request_id: str | None = None
    rid: str | None = None  # SGLang's name of it
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def own_request_id(self) -> str | None:
        return self.request_id if self.rid is None else self.rid

    @property
    def cache_key(self) -> str | None:
        return self.session_id if self.prompt_cache_key is None else self.prompt_cache_key

    @property
    def labels(self) -> dict[str, str]:
        """What the log says of the request."""
        texts = {
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "metadata": quoted(self.metadata) if self.metadata else None,
        }
        return {name: shortened(text) for name, text in texts.items() if text}

    @property
    def extended_params(self) -> dict[str, Any]:
        """Those of SamplingParams."""
        given = {
            "min_tokens": self.min_tokens,
            "bad_words": tuple(self.bad_words or ()),
            "allowed_token_ids": tuple(self.allowed_token_ids) if self.allowed_token_ids else None,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.no_stop_trim or self.include_stop_str_in_output,
            "priority": self.priority,
        }
        return {name: value for name, value in given.items() if value is not None}

    def check_extended(self, n: int, stream: bool) -> None:
        """Checks of values that msgspec and SamplingParams do not know. Raises ApiError."""
        if self.best_of not in (None, n):
            raise unsupported("best_of", f"best_of={self.best_of}: eprt returns all n={n} it generates")
        most = self.truncate_prompt_tokens
        if most is not None and most < 1 and most != -1:
            what = f"truncate_prompt_tokens={most}: must be at least 1, or -1 for as many as fit"
            raise invalid("truncate_prompt_tokens", what)
        if self.prompt_logprobs is not None and stream:
            raise invalid("prompt_logprobs", "prompt_logprobs is only for stream=false")
        if len(self.bad_words or ()) > _MAX_BAD_WORDS:
            raise invalid("bad_words", f"bad_words has {len(self.bad_words or ())} words; at most {_MAX_BAD_WORDS}")
        self._check_request_id()

    def _check_request_id(self) -> None:
        if None not in (self.request_id, self.rid) and self.request_id != self.rid:
            raise invalid("rid", f"request_id={quoted(self.request_id)} and rid={quoted(self.rid)} differ; give one")
        name = "request_id" if self.rid is None else "rid"
        if self.own_request_id is not None and not _REQUEST_ID.fullmatch(self.own_request_id):
            raise _bad_id(name, self.own_request_id)


def _bad_id(name: str, value: str) -> ApiError:
    return invalid(name, f"{name}={quoted(value)}: must be 1 to 128 printable ASCII characters without spaces")
