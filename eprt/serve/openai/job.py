"""GenerationJob: one request, parsed and checked: what the ranks must generate, and how the answer is to be written.

Knows nothing of how a request was parsed or of how an answer is put together.
"""

import time
from dataclasses import dataclass, field, replace

from eprt.engine.sampling_params import SamplingParams
from eprt.serve.openai.forms import RequestedForm
from eprt.serve.openai.reasoning import ReasoningFormat
from eprt.serve.openai.tools import ToolFormat, ToolProperties
from eprt.serve.tiers.table import TierTable, in_tier
from eprt.serve.tiers.tier import Tier


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request."""

    text: str | None  # with which an answer with echo begins; None where the prompt was given as token ids
    token_ids: list[int]


@dataclass(frozen=True)
class TextFormats:
    """What is looked for in the text of a completion."""

    tools: ToolFormat | None = None  # None unless the request has tools
    properties: ToolProperties | None = None  # of these tools
    reasoning: ReasoningFormat | None = None
    begins_inside: bool = False  # the completion begins amid the reasoning
    shows_reasoning: bool = True
    keeps_special_tokens: bool = False  # a mark contains one

    @property
    def holds_back(self) -> bool:
        """Whether a token may add nothing that is shown."""
        return self.tools is not None or self.reasoning is not None


@dataclass(frozen=True)
class GenerationJob:
    """One request: params.n sequences of each prompt."""

    request_id: str
    model: str
    endpoint: str  # for logs and metrics
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False  # one more event at a stream's end
    continuous_usage: bool = False  # in every event of a stream
    return_token_ids: bool = False
    echo: bool = False
    formats: TextFormats = TextFormats()
    form: RequestedForm | None = None  # what params.structured_outputs comes from
    prompt_logprobs: int | None = None  # how many alternatives to show beside each token of the prompt; None: no report
    tokens_as_ids: bool = False  # in log-probabilities tokens are written as their ids
    cache_key: str | None = None  # of requests that begin alike (router.py)
    asked_tier: str | None = None  # the request's service_tier
    tier: Tier | None = None  # of service; None: the server has none
    labels: dict[str, str] = field(default_factory=dict)  # what the log says of the request
    created: int = field(default_factory=lambda: int(time.time()))
    started_s: float = field(default_factory=time.monotonic)

    @property
    def given_tier(self) -> str | None:
        """What the answer says of it; None: it says nothing."""
        if self.tier is None:
            return None if self.asked_tier is None else "default"
        return self.tier.name

    def with_tier(self, table: TierTable, of_key: str | None) -> "GenerationJob":
        """As the tier has it that the request and its key ask for. ApiError."""
        tier = table.choose_tier(self.asked_tier, of_key)
        return self if tier is None else replace(self, tier=tier, params=in_tier(self.params, tier))

    @property
    def sequences(self) -> list[tuple[list[int], SamplingParams]]:
        return [(prompt.token_ids, self.params) for prompt in self.prompts]
