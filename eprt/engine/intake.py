"""Intake: requests enter an engine: checked, with a seed, as those that are new and those that come from elsewhere.

Knows nothing of steps.
"""

from collections.abc import Sequence

import numpy as np

from eprt.config import EngineConfig, ModelConfig
from eprt.engine.handoff import Handoff
from eprt.engine.preparation import Preparation
from eprt.engine.request import QueueFullError, Request, RequestLimits
from eprt.engine.sampling_params import SamplingParams
from eprt.ep.group.group import EPGroup
from eprt.kv.reader import HeldPages


class Intake:
    """Of one rank's engine."""

    def __init__(
        self,
        group: EPGroup,
        model: ModelConfig,
        config: EngineConfig,
        limits: RequestLimits,
        preparation: Preparation,
        handoff: Handoff,
    ):
        self._who, self._model, self._limits = f"[rank {group.rank}/{group.size}]", model, limits
        self._max_queue, self._preparation, self._handoff = config.max_queue, preparation, handoff
        self._seeds = np.random.default_rng([config.seed, group.rank])

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        sample_idx: int,
        generated: Sequence[int],
        hands_over: bool,
    ) -> None:
        """As Engine.add_request."""
        self._check_request(prompt_token_ids, params, generated)
        if self._preparation.num_waiting >= self._max_queue:
            raise QueueFullError(
                f"{self._who} {self._preparation.num_waiting} requests are waiting, max_queue is {self._max_queue}; "
                "try again later"
            )
        if hands_over:
            self._handoff.require_cache()
        request = self._make_request(request_id, prompt_token_ids, params, sample_idx, generated, hands_over)
        self._preparation.add_request(request)

    def offer_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        sample_idx: int,
        generated: Sequence[int],
        held: HeldPages,
    ) -> None:
        """A request goes on here whose pages another instance holds, for all tokens but the last generated one. It
        runs once they have been pulled and Handoff.start_request() is called. ValueError where it cannot."""
        self._check_request(prompt_token_ids, params, generated)
        request = self._make_request(request_id, prompt_token_ids, params, sample_idx, generated, hands_over=False)
        self._handoff.offer_request(request, held)

    def _check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams, generated: Sequence[int]) -> None:
        self._limits.check(prompt_token_ids, params)
        self._limits.check_generated(prompt_token_ids, params, generated)

    def _make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        sample_idx: int,
        generated: Sequence[int],
        hands_over: bool,
    ) -> Request:
        return Request.new(
            request_id,
            prompt_token_ids,
            params,
            sample_idx=sample_idx,
            seed=int(self._seeds.integers(1 << 63)) if params.seed is None else params.seed,
            max_model_len=self._limits.max_model_len,
            eos_token_ids=self._model.eos_token_ids,
            generated=generated,
            hands_over=hands_over,
        )
