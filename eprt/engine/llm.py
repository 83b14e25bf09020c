"""LLM: offline generation, on one rank or many. Knows nothing of HTTP.

    with LLM("path/to/checkpoint") as llm:
        for output in llm.generate(["1 + 1 ="], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

Under mpirun every rank runs the same program and calls generate() with the same prompts; every rank gets all results.
"""

import hashlib
import inspect
import logging
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from eprt import env
from eprt.bind import bind
from eprt.config import EngineConfig
from eprt.engine.bad_words import with_bad_word_ids
from eprt.engine.engine import Engine
from eprt.engine.form_checker import FormChecker
from eprt.engine.outputs import CompletionOutput, RequestOutput, TokenOutput
from eprt.engine.router import Router
from eprt.engine.sampling_defaults import read_sampling_defaults
from eprt.engine.sampling_params import SamplingParams
from eprt.engine.sequence_text import SequenceText
from eprt.engine.structured_outputs import StructuredOutputs
from eprt.engine.tokenizer import Tokenizer
from eprt.ep.group.agreement import all_or_none, first_difference
from eprt.ep.group.group import EPGroup

_NO_LIMIT = 1 << 31
_log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one completion."""

    prompt_idx: int
    sample_idx: int  # 0..n-1
    token_id: int
    text: str
    finish_reason: str | None  # set on the completion's last piece


@dataclass(slots=True)
class _Completion:
    """One completion under way, and its prompt."""

    request_id: str  # the same on all ranks
    prompt_idx: int
    sample_idx: int
    prompt: str | None  # None where it was given as token ids
    prompt_token_ids: list[int]
    params: SamplingParams
    text: SequenceText
    pieces: list[str] = field(default_factory=list)  # of the text
    outputs: list[TokenOutput] = field(default_factory=list)  # the first one carries what is known of the prompt

    @property
    def finish_reason(self) -> str | None:
        """None while the completion runs."""
        return self.text.finish_reason

    def add_output(self, output: TokenOutput) -> Piece:
        self.outputs.append(output)
        self.pieces.append(self.text.add_output(output))
        return Piece(self.prompt_idx, self.sample_idx, output.token_id, self.pieces[-1], self.finish_reason)

    def to_output(self) -> CompletionOutput:
        assert self.finish_reason is not None
        tokens = [output for output in self.outputs if output.token_id >= 0]
        wants_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            self.sample_idx,
            [token.token_id for token in tokens],
            "".join(self.pieces) if self.text.is_decoded else None,
            self.finish_reason,
            [token.logprob for token in tokens if token.logprob is not None] if wants_logprobs else None,
            [token.top_logprobs for token in tokens if token.logprob is not None] if wants_logprobs else None,
            self.outputs[-1].error,
        )


class LLM:
    """A model ready to generate. Construction is collective over the group's ranks.

    Args:
        model_dir: a Hugging Face checkpoint directory. Without a tokenizer.json in it, prompts must be token ids.
        group: default this process alone or, where mpirun started it, all ranks of the job, each then bound to its
            share of the cores; an error that one of them does not catch then ends them all.
        progress: progress(bytes_read, bytes_to_read) is called while the model loads.
        engine_options: fields of EngineConfig, except max_queue.

    Requests without a seed get one from engine_options' seed: two runs of the same program give the same tokens.
    """

    def __init__(
        self,
        model_dir: str | Path,
        group: EPGroup | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **engine_options: Any,
    ):
        if "max_queue" in engine_options:
            raise ValueError(f"max_queue={engine_options['max_queue']}: all prompts are queued here; leave it out")
        config = EngineConfig(str(model_dir), max_queue=_NO_LIMIT, **engine_options)
        self._owns_group = group is None
        self.group = _default_group() if group is None else group
        self.tokenizer = Tokenizer(model_dir) if (Path(model_dir) / "tokenizer.json").exists() else None
        self._form_checker = None if self.tokenizer is None else FormChecker(self.tokenizer)
        self.engine = Engine(config, self.group, progress=progress)
        self.default_params = SamplingParams(**read_sampling_defaults(config))  # type: ignore[arg-type]
        self._seeds = np.random.default_rng(config.seed)  # in the same state on all ranks
        self._num_requests = 0
        self._stream: Generator[Piece, None, None] | None = None  # of the latest call of stream()

    def generate(self, prompts: Prompts, sampling_params: Params = None) -> list[RequestOutput]:
        """All completions of all prompts, in the prompts' order. Collective: same arguments on all ranks.

        prompts: one or many, each a text or a list of token ids. sampling_params: one for all, or one per prompt;
        None: default_params, those of the checkpoint's generation_config.json.
        Raises ValueError, on all ranks and before anything runs, for a prompt that can never run, and for arguments
        that are not the same on all ranks.
        """
        self._begin()
        completions = self._prepare(prompts, sampling_params)
        for _ in self._run(completions):
            pass
        return self._gather(completions)

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[Piece]:
        """Pieces of the completions that run on this rank, as they are generated; the first prompt runs on rank 0.

        Collective like generate(): every rank must iterate. Leaving the loop early drops this rank's completions, and
        so does the next call of generate() or stream().
        """
        self._begin()
        self._stream = run = self._run(self._prepare(prompts, sampling_params))
        yield from run

    def _begin(self) -> None:
        """RuntimeError where nothing can be generated any more, before a rank waits for the others."""
        self.engine.check_alive()
        # An iterator that the caller left may still exist, in a traceback for instance, and its requests with it.
        if self._stream is not None and inspect.getgeneratorstate(self._stream) == inspect.GEN_SUSPENDED:
            _log.warning("a stream was not read to its end: the rest of its completions is dropped")
            self._stream.close()

    def close(self) -> None:
        """Frees the engine, the model and the group if LLM made it. Collective."""
        self.engine.close()
        if self._form_checker is not None:
            self._form_checker.close()
        if self._owns_group:
            self.group.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, error_type: type | None, *_: object) -> None:
        # After an error on one rank the others will not join a collective close.
        if error_type is None or self.group.size == 1:
            self.close()

    # -- from prompts to completions --

    def _prepare(self, prompts: Prompts, sampling_params: Params) -> list[_Completion]:
        """What to run. Raises on all ranks where one of them refuses it, or where they do not agree."""
        before = self._num_requests, self._seeds.bit_generator.state
        try:
            with all_or_none(self.group, "run the prompts"):
                completions = self._make_completions(prompts, sampling_params)
            given = repr([(completion.prompt_token_ids, completion.params) for completion in completions])
            differs = first_difference(self.group, {"prompts": hashlib.sha256(given.encode()).hexdigest()})
            if differs is not None:
                where = f"[rank {self.group.rank}/{self.group.size}] rank {differs.rank}"
                raise ValueError(f"{where} has other prompts or sampling_params than rank 0; give all ranks the same")
        except Exception:
            self._num_requests, self._seeds.bit_generator.state = before  # equal on all ranks again
            raise
        return completions

    def _make_completions(self, prompts: Prompts, sampling_params: Params) -> list[_Completion]:
        prompts = _as_list(prompts)
        if not isinstance(sampling_params, Sequence):
            sampling_params = [self.default_params if sampling_params is None else sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params: give one or as many")
        completions: list[_Completion] = []
        for prompt_idx, (prompt, params) in enumerate(zip(prompts, sampling_params)):
            try:
                completions += self._make_completions_of(prompt_idx, prompt, params)
            except ValueError as error:
                raise ValueError(f"prompt {prompt_idx}: {error}") from None
        return completions

    def _make_completions_of(self, prompt_idx: int, prompt: Prompt, params: SamplingParams) -> list[_Completion]:
        """The params.n completions of one prompt, which share one seed."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is {params!r:.80}; give a SamplingParams")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need the checkpoint's tokenizer.json; use stop_token_ids")
        if params.bad_words:
            if self.tokenizer is None:
                raise ValueError("bad_words need the checkpoint's tokenizer.json; use bad_word_ids")
            params = with_bad_word_ids(params, self.tokenizer)
        if params.structured_outputs is not None:
            self._check_form(params.structured_outputs)
        token_ids = self._encode(prompt)
        self.engine.limits.check(token_ids, params)
        if params.seed is None:
            params = replace(params, seed=int(self._seeds.integers(1 << 63)))
        first = self._num_requests
        self._num_requests += params.n
        given = (prompt if isinstance(prompt, str) else None, token_ids, params)
        return [
            _Completion(str(first + i), prompt_idx, i, *given, SequenceText(self.tokenizer, params))
            for i in range(params.n)
        ]

    def _check_form(self, outputs: StructuredOutputs) -> None:
        """So that what is refused is refused now, by ValueError: first beside this process, which a form may keep busy
        without end. The form checker's processes start with the first form."""
        if self._form_checker is not None and (refusal := self._form_checker.why_refused(outputs)):
            raise ValueError(refusal)
        self.engine.grammars.compile(outputs)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, bytes):  # else each byte would pass as a token id
            raise ValueError(f"a prompt is a text or a list of token ids, not {prompt[:80]!r}")
        if not isinstance(prompt, str):
            try:
                return [operator.index(token_id) for token_id in prompt]
            except TypeError:
                raise ValueError(f"a prompt is a text or a list of token ids, not {str(prompt)[:80]}") from None
        if self.tokenizer is None:
            raise ValueError("a text prompt needs the checkpoint's tokenizer.json; pass token ids")
        return self.tokenizer.encode(prompt)

    # -- running --

    def _run(self, completions: list[_Completion]) -> Generator[Piece, None, None]:
        """Runs this rank's share; yields what each step adds to it."""
        router = Router(self.group.size, _NO_LIMIT, self.engine.config.page_size)
        mine = {
            c.request_id: c for c in completions if router.assign(c.request_id, c.prompt_token_ids) == self.group.rank
        }
        all_idle = False
        try:
            for c in mine.values():
                self.engine.add_request(c.request_id, c.prompt_token_ids, c.params, c.sample_idx)
            while not all_idle:
                result = self.engine.step(self._num_requests)
                all_idle = result.all_idle
                for output in result.outputs:
                    completion = mine[output.request_id]
                    if completion.finish_reason is not None:
                        continue  # a drafted token after the stop string
                    piece = completion.add_output(output)
                    if completion.finish_reason is not None:
                        self.engine.abort(completion.request_id)  # ended by a stop string; else it has ended already
                    yield piece
        except BaseException as error:
            if not self.engine.ended_by:  # else it takes no more calls
                for request_id in mine:
                    self.engine.abort(request_id)
            # Left early: the other ranks still need this one's experts until they have finished too.
            while isinstance(error, GeneratorExit) and not all_idle and not self.engine.ended_by:
                all_idle = self.engine.step(self._num_requests).all_idle
            raise

    def _gather(self, completions: list[_Completion]) -> list[RequestOutput]:
        mine = {c.request_id: (c.to_output(), c.outputs[0]) for c in completions if c.finish_reason is not None}
        everyones = {key: value for part in self.group.allgather(mine) for key, value in part.items()}
        results = []
        for _, samples in groupby(completions, key=lambda completion: completion.prompt_idx):
            completion, *others = samples
            output, first = everyones[completion.request_id]
            outputs = [output, *(everyones[other.request_id][0] for other in others)]
            logprobs = first.prompt_logprobs
            known = (
                None if logprobs is None else tuple(of_token[:2] for of_token in logprobs),
                first.num_cached_tokens,
            )
            results.append(RequestOutput(completion.prompt, completion.prompt_token_ids, outputs, *known))
        return results


def _as_list(prompts: Any) -> Sequence[Prompt]:
    """One or many prompts, as a list. An array or another sequence of token ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        if isinstance(prompts, bytes | Mapping):
            raise TypeError
        return [prompts] if len(prompts) and isinstance(prompts[0], Integral) else prompts
    except TypeError:
        what = f"prompts is {str(prompts)[:80]}; give one or many, each a text or a list of token ids"
        raise ValueError(what) from None


def _default_group() -> EPGroup:
    """All ranks of the MPI job, each bound to its share of the cores, or this process as it is."""
    if not env.started_by_mpirun():
        return EPGroup.single()
    from eprt.ep.group.mpi_group import end_job_on_errors

    group = EPGroup.from_mpi()
    if group.size > 1:
        end_job_on_errors()
    bind("core", group.allgather)
    return group
