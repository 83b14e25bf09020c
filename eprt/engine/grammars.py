"""Grammars: structured outputs become matchers, which say for each position of a completion which tokens may follow.

The work is llguidance's: it takes the grammar and the bytes of all tokens, and finds the mask of a position when asked
for it; nothing is precomputed for the whole vocabulary, so compiling takes milliseconds. What it cannot enforce it
refuses. Compiled grammars are kept, the latest ones. Imports no torch, so that the process that serves HTTP can refuse
a bad schema without asking a rank. Knows nothing of requests.
"""

import json
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from eprt.engine import lark
from eprt.engine.json_schemas import enforceable, locate_refusal
from eprt.engine.structured_outputs import WHITESPACE, StructuredOutputs
from eprt.engine.tokenizer import Tokenizer
from eprt.model_config import ModelConfig

_NUM_KEPT = 256
# A grammar of this length, however it nests, is compiled within a stack of this size (found by trial: rules that each
# name the next, which the compiler follows by recursion).
_LONGEST = 256_000
_STACK_BYTES = 256 << 20
# Slices of a vocabulary are what a mask allows or forbids as a whole. To look at them takes longer than to walk through
# a vocabulary of this size (tried with 640 tokens); the masks are the same.
_UNSLICED = 2048
# Besides, llguidance bounds the work on a grammar: some 100 ms to compile it, some 15 ms for one mask.
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class GrammarError(ValueError):
    """A form that cannot be enforced. path: JSON pointer into the schema; "": its root, or not a schema."""

    def __init__(self, message: str, path: str = ""):
        super().__init__(f"at {path}: {message}" if path else message)


@dataclass(frozen=True, slots=True)
class MaskRows:
    """Memory for masks, and where each lies: to ask numpy for that takes as long as to find some masks."""

    bits_YB: np.ndarray  # uint8
    places: range  # addresses of the rows

    @staticmethod
    def allocate(num_masks: int, mask_bytes: int) -> "MaskRows":
        """Masks that allow everything."""
        bits_YB = np.full((num_masks, mask_bytes), 0xFF, dtype=np.uint8)
        start = bits_YB.ctypes.data
        return MaskRows(bits_YB, range(start, start + num_masks * mask_bytes, mask_bytes))


class Grammars:
    """Matchers for one model. Its methods may be called from any thread.

    Args:
        load_tokenizer: called when the first grammar is compiled.
        vocab_size: of the model's logits; 0: it is not known, and masks are not asked for.
        eos_token_ids: what ends a completion.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int = 0, eos_token_ids: Sequence[int] = ()):
        self._load_tokenizer, self._vocab_size, self._eos_token_ids = load_tokenizer, vocab_size, list(eos_token_ids)
        self._kept: OrderedDict[StructuredOutputs, llguidance.LLMatcher] = OrderedDict()
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    @staticmethod
    def from_checkpoint(model_dir: str | Path, config: ModelConfig) -> "Grammars":
        """For a rank."""

        def load_tokenizer() -> Tokenizer:
            if not (Path(model_dir) / "tokenizer.json").is_file():
                raise GrammarError("structured outputs need the checkpoint's tokenizer.json")
            if not config.eos_token_ids:
                raise GrammarError("structured outputs need an end token, and the checkpoint's configuration has none")
            return Tokenizer(model_dir)

        return Grammars(load_tokenizer, config.vocab_size, config.eos_token_ids)

    def find(self, outputs: StructuredOutputs) -> llguidance.LLMatcher | None:
        """What compile() returns, if it has been compiled lately."""
        with self._lock:
            if outputs in self._kept:
                self._kept.move_to_end(outputs)
            return self._kept.get(outputs)

    def compile(self, outputs: StructuredOutputs) -> llguidance.LLMatcher:
        """A matcher at the beginning of a completion, to be copied. GrammarError, saying why and where, for what cannot
        be enforced."""
        with self._compiling:
            matcher = self.find(outputs)
            if matcher is None:
                matcher = _with_large_stack(lambda: self._make_matcher(outputs))
                with self._lock:
                    self._kept[outputs] = matcher
                    if len(self._kept) > _NUM_KEPT:
                        self._kept.popitem(last=False)
        return matcher

    def _make_matcher(self, outputs: StructuredOutputs) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(
            self._ll_tokenizer, _grammar_text(outputs, self._special), log_level=0, limits=_LIMITS
        )
        first = matcher.deep_copy()
        if not matcher.is_error():
            first.compute_bitmask()  # some grammars exceed the limits here only
        if first.is_error():
            message = first.get_error()
            is_schema = outputs.form == "json" and matcher.is_error()
            raise GrammarError(
                _reworded(message), locate_refusal(json.loads(outputs.text), message) if is_schema else ""
            )
        return matcher

    @cached_property
    def _ll_tokenizer(self) -> llguidance.LLTokenizer:
        """Takes up to a second, and tens of megabytes, for the largest vocabularies."""
        tokenizer = self._load_tokenizer()
        num_tokens = max(self._vocab_size, tokenizer.num_tokens)
        return llguidance.LLTokenizer(
            tokenizer.to_json(),
            n_vocab=num_tokens,
            eos_token=self._eos_token_ids or None,
            slices=[] if num_tokens <= _UNSLICED else None,
        )

    @cached_property
    def _special(self) -> dict[str, int]:
        """Text -> id of the tokens that no text of a grammar stands for."""
        tokens = self._load_tokenizer().added_tokens
        return {text: token_id for text, token_id in tokens.items() if self._ll_tokenizer.is_special_token(token_id)}

    # -- what masks are made with --

    def fill_masks(
        self, matchers: list[llguidance.LLMatcher], token_ids: list[int] | None, masks: MaskRows, in_threads: bool
    ) -> None:
        """Gives each matcher its token, and writes the mask of where it is then. A token that does not fit is an error
        of the matcher.

        token_ids: None: the matchers have their tokens.
        in_threads: several threads do it, while the interpreter does something else. One is sooner done with small
            masks than others are awake.
        """
        num_bytes = masks.places.step
        if in_threads:
            if token_ids is not None:
                self._executor.consume_token_par(list(zip(matchers, token_ids)))
            jobs = list(zip(matchers, range(len(matchers))))
            self._executor.unsafe_compute_mask_ptr(jobs, masks.places.start, num_bytes, len(jobs))
            return
        # Two loops: the code of each stays in the CPU's first cache, which has no room for that of both.
        if token_ids is not None:
            _run_all(map(llguidance.LLMatcher.consume_token, matchers, token_ids))
        _run_all(map(llguidance.LLMatcher.unsafe_compute_mask_ptr, matchers, masks.places, repeat(num_bytes)))

    def fill_draft_masks(
        self,
        jobs: list[tuple[llguidance.LLMatcher, int, list[int]]],
        token_ids: list[int] | None,
        masks: MaskRows,
        in_threads: bool,
    ) -> None:
        """The same with drafts. jobs: of each matcher the row of its mask, behind which those of the places behind the
        drafts come, as far as these fit the grammar; and its drafts."""
        num_bytes = masks.places.step
        if in_threads:
            if token_ids is not None:
                self._executor.consume_token_par([(matcher, token) for (matcher, _, _), token in zip(jobs, token_ids)])
            where = masks.places.start, num_bytes, len(masks.places)
            plain = [(matcher, row) for matcher, row, drafts in jobs if not drafts]
            if plain:
                self._executor.unsafe_compute_mask_ptr(plain, *where)
            drafted = [job for job in jobs if job[2]]
            if drafted:
                self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
            return
        for (matcher, row, drafts), token_id in zip(jobs, token_ids or repeat(None)):
            if token_id is not None:
                matcher.consume_token(token_id)
            if drafts:
                matcher.unsafe_compute_mask_ptr_with_draft_token(  # type: ignore[attr-defined]  # not in its stubs
                    masks.places[row], num_bytes, drafts
                )
            else:
                matcher.unsafe_compute_mask_ptr(masks.places[row], num_bytes)

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        """Its threads run beside those of the forward pass."""
        return llguidance.LLExecutor(num_threads=max(1, min(4, len(os.sched_getaffinity(0)) - 1)))

    @cached_property
    def mask_bytes(self) -> int:
        """Of one mask. llguidance writes words of 32 bits."""
        return 4 * -(-self._ll_tokenizer.vocab_size // 32)

    @cached_property
    def eos_B(self) -> np.ndarray:
        """uint8: a mask of the tokens that end a completion."""
        mask_B = np.zeros(self.mask_bytes, dtype=np.uint8)
        for token_id in self._eos_token_ids:
            mask_B[token_id // 8] |= 1 << token_id % 8
        return mask_B


# Calls whatever an iterator calls, at the speed of C. Unlike all(), to the end.
_run_all = deque(maxlen=0).extend


def _grammar_text(outputs: StructuredOutputs, special: Mapping[str, int]) -> str:
    """The form as llguidance takes it. GrammarError for what is not even readable."""
    length = len(outputs.text)
    if length > _LONGEST:
        raise GrammarError(f"it has {length} characters; at most {_LONGEST}")
    try:
        form = _form_part(outputs, special)
    except json.JSONDecodeError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(str(error)) from None
    except TypeError as error:  # a number where a list belongs, for instance
        raise GrammarError(f"not a JSON schema: {error}") from None
    main = lark.text_before(outputs.after, special)
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, {"name": lark.FORM, **form}]})


def _form_part(outputs: StructuredOutputs, special: Mapping[str, int]) -> dict[str, Any]:
    """One of llguidance's grammars."""
    if outputs.form == "regex":
        (grammar,) = json.loads(llguidance.LLMatcher.grammar_from_regex(outputs.text))["grammars"]
        return {"lark_grammar": grammar["lark_grammar"]}
    if outputs.choice is not None:
        # A terminal: alternatives of a rule would each count against the parser's limits.
        return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, outputs.choice))}
    if outputs.form == "grammar":
        try:
            return {"lark_grammar": any_to_lark(outputs.text)}
        except Exception as error:  # of several kinds
            raise GrammarError(f"not a grammar in GBNF: {error}") from None
    if outputs.calls is not None:
        frames = tuple((a, json.dumps(enforceable(json.loads(schema))), b) for a, schema, b in outputs.calls.frames)
        return {"lark_grammar": lark.framed_calls(replace(outputs.calls, frames=frames), special)}
    pattern = WHITESPACE if outputs.whitespace_pattern is None else outputs.whitespace_pattern
    return {"json_schema": enforceable(json.loads(outputs.text), pattern)}


def _reworded(message: str) -> str:
    keywords = re.match(r"Unimplemented keys: \[(.*?)\]", message)
    if keywords:
        return f"answers cannot be held to {keywords[1]}"
    if "recursion limit exceeded" in message:
        return "the schema is nested too deeply"
    message = message.partition("<non-verbose/>")[0].partition("<backtrace")[0]
    lines = [line.strip() for line in message.splitlines() if line.strip() and "while processing" not in line]
    return " | ".join(lines)[:400]


def _with_large_stack(function: Callable[[], llguidance.LLMatcher]) -> llguidance.LLMatcher:
    """function(), run in a thread of its own."""
    results: list[llguidance.LLMatcher] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="compile")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
