"""Preparer: a parsed request becomes a GenerationJob: chat template, tokens, limits.

Everything a client can get wrong is refused here or in parsing.py, before a rank hears of it. The work is bounded by
the length of the body: a prompt that is far too long is refused by its size. Knows nothing of HTTP.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from eprt.engine.bad_words import with_bad_word_ids
from eprt.engine.request import RequestLimits
from eprt.engine.sampling_params import SamplingParams
from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import ApiError, invalid, quoted, shortened, unsupported
from eprt.serve.openai.chat import ChatTemplate
from eprt.serve.openai.conversation import render_conversation
from eprt.serve.openai.formats import ModelFormats
from eprt.serve.openai.forms import Forms
from eprt.serve.openai.infilling import Infilling
from eprt.serve.openai.job import GenerationJob, Prompt, TextFormats
from eprt.serve.openai.prompt_template import PromptTemplate, text_of
from eprt.serve.openai.protocol import NO_DEFAULTS, ChatRequest, CompletionRequest
from eprt.serve.openai.thinking import ThinkingSwitch

# OpenAI's default for /v1/completions. A chat answer may be as long as the model can go on.
_DEFAULT_MAX_TOKENS = 16
_NO_TEMPLATE = (
    "the model has no chat template: send a prompt to /v1/completions, or start the server with --chat-template FILE"
)


class Preparer:
    """Prepares requests for one model, which may lack tokenizer and template.

    Args:
        max_sequences: running and waiting.
        formats: how the model writes tool calls and reasoning.
        aliases: further names of the model.
        defaults: of SamplingParams, for what a request does not say (sampling_defaults.py).
        trusts_templates: whether a request may bring a chat template of its own.
    """

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer | None,
        template: PromptTemplate | None,
        max_sequences: int,
        formats: ModelFormats | None = None,
        aliases: tuple[str, ...] = (),
        defaults: Mapping[str, Any] = NO_DEFAULTS,
        trusts_templates: bool = False,
    ):
        self._names = (None, model_name, *aliases)
        self._model_name, self.tokenizer, self._template = model_name, tokenizer, template
        self._max_sequences = max_sequences
        self._formats = formats = formats or ModelFormats()
        self.forms = Forms(tokenizer, formats)
        self._thinking = ThinkingSwitch(template, formats.reasoning) if template else None
        self._keeps_special_tokens = bool(tokenizer) and formats.has_special_marks(tokenizer)
        self._longest_token = tokenizer.longest_token if tokenizer else None
        self._infilling = Infilling.from_tokenizer(tokenizer) if tokenizer else None
        self._defaults, self._trusts_templates = defaults, trusts_templates
        self._read_template = lru_cache(8)(self._compile_template)

    def completion(self, request: CompletionRequest, request_id: str, limits: RequestLimits) -> GenerationJob:
        self.check_model(request.model)
        self._check_number(request.num_prompts, request.n or 1)
        given = request.prompts()
        if request.suffix:
            given = [self._with_suffix(_prompt_name(i, len(given)), p, request.suffix) for i, p in enumerate(given)]
        prompts = [self._prompt(_prompt_name(i, len(given)), prompt, request, limits) for i, prompt in enumerate(given)]
        longest = max(len(prompt.token_ids) for prompt in prompts)
        echo = bool(request.echo)
        params = request.sampling_params(
            max_tokens=_fit(longest, request.max_new_tokens, limits, "prompt", default=_DEFAULT_MAX_TOKENS),
            logprobs=request.logprobs,
            prompt_logprobs=request.num_prompt_logprobs,
            defaults=self._defaults,
        )
        more: dict[str, Any] = {"echo": echo, "form": self.forms.of_completion(request)}
        return self._make_job(request, request_id, limits, prompts, params, endpoint="completions", **more)

    def chat(
        self, request: ChatRequest, request_id: str, limits: RequestLimits, endpoint: str = "chat"
    ) -> GenerationJob:
        """endpoint: the API that was asked, for logs and metrics; all chat APIs end here."""
        self.check_model(request.model)
        self._check_number(1, request.n or 1)
        text = self.render_chat(request)
        echo = text_of(request.messages[-1]) if request.echo else None
        prompt = Prompt(echo, self._encode("messages", text, request, limits, bool(request.add_special_tokens)))
        params = request.sampling_params(
            max_tokens=_fit(len(prompt.token_ids), request.max_new_tokens, limits, "messages"),
            logprobs=request.num_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            defaults=self._defaults,
        )
        more: dict[str, Any] = {"formats": self._text_formats(request, text), "echo": echo is not None}
        more["form"] = self.forms.of_chat(request, text)
        return self._make_job(request, request_id, limits, [prompt], params, endpoint=endpoint, **more)

    def _text_formats(self, request: ChatRequest, text: str) -> TextFormats:
        """text: the rendered prompt."""
        tools = self._formats.tools if request.uses_tools else None
        reasoning = self._formats.reasoning if request.separate_reasoning is not False else None
        prefix = text_of(request.messages[-1]) if request.continues_final else ""
        functions = [tool.function for tool in request.tools or ()]
        return TextFormats(
            tools=tools,
            properties={f.name: frozenset((f.parameters or {}).get("properties") or {}) for f in functions},
            reasoning=reasoning,
            begins_inside=reasoning is not None and reasoning.begins_inside(text, prefix),
            shows_reasoning=request.include_reasoning is not False,
            keeps_special_tokens=self._keeps_special_tokens and (tools is not None or reasoning is not None),
        )

    def render_chat(self, request: ChatRequest) -> str:
        """The messages as the model reads them."""
        if self.tokenizer is None:
            raise invalid("messages", "the server runs without a tokenizer: send token ids to /v1/completions")
        template, thinking = self._template, self._thinking
        if request.chat_template is not None:
            if not self._trusts_templates:
                what = "chat_template: a template is a program, and this server runs only its model's; start it with "
                raise unsupported("chat_template", what + "--trust-request-chat-template to run those of its clients")
            template, thinking = self._read_template(request.chat_template)
        if template is None or thinking is None:
            raise invalid("messages", _NO_TEMPLATE)
        return render_conversation(template, request, thinking.template_variables(request))

    def _compile_template(self, source: str) -> tuple[PromptTemplate, ThinkingSwitch]:
        """Of a request."""
        assert self.tokenizer is not None, "without a tokenizer there is no chat"
        try:
            template = ChatTemplate(source, self.tokenizer.special_tokens)
        except ValueError as error:
            raise invalid("chat_template", str(error)) from None
        return template, ThinkingSwitch(template, self._formats.reasoning)

    def _make_job(
        self,
        request: CompletionRequest | ChatRequest,
        request_id: str,
        limits: RequestLimits,
        prompts: list[Prompt],
        params: SamplingParams,
        **more: Any,
    ) -> GenerationJob:
        params = self._without_text(params)
        if more["form"] is not None:
            params = replace(params, structured_outputs=more["form"].outputs)
        for i, prompt in enumerate(prompts):
            try:
                limits.check(prompt.token_ids, params)
            except ValueError as error:
                param = str(error).partition(":")[0]
                if param in ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"):
                    raise invalid(param, str(error)) from None
                if isinstance(request, ChatRequest):
                    raise invalid("messages", str(error)) from None
                where = _prompt_name(i, len(prompts))
                raise invalid(where, f"{where}: {error}") from None
        options = request.stream_options
        return GenerationJob(
            request_id=request_id,
            model=self._model_name,
            prompts=prompts,
            params=params,
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            # Without a tokenizer there is no text; the ids are the answer.
            return_token_ids=bool(request.return_token_ids) or self.tokenizer is None,
            prompt_logprobs=request.prompt_logprobs,
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            cache_key=request.cache_key,
            asked_tier=request.service_tier,
            labels=request.labels,
            **more,
        )

    def _without_text(self, params: SamplingParams) -> SamplingParams:
        """What the engine can run: it knows token ids alone. Stop strings are looked for where tokens become text."""
        if self.tokenizer is not None:
            return with_bad_word_ids(params, self.tokenizer)
        if params.stop:
            raise invalid("stop", "the server runs without a tokenizer: use stop_token_ids")
        if params.bad_words:
            raise invalid("bad_words", "the server runs without a tokenizer: use logit_bias")
        return params

    def check_model(self, model: str | None) -> None:
        """ApiError 404 for the name of another model."""
        if model not in self._names:
            message = f"no model {shortened(repr(model))} here; this server has {self._model_name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _check_number(self, num_prompts: int, n: int) -> None:
        if num_prompts * n > self._max_sequences:
            param = "prompt" if num_prompts > self._max_sequences else "n"
            what = f"{num_prompts} prompt{'' if num_prompts == 1 else 's'} with n={n} are {num_prompts * n} sequences"
            raise invalid(param, f"{what}; the server runs and queues at most {self._max_sequences}")

    def _with_suffix(self, param: str, prompt: str | list[int], suffix: str) -> str:
        if self._infilling is None:
            what = f"suffix={quoted(suffix)}: the model's vocabulary has no tokens for filling in the middle"
            raise unsupported("suffix", what)
        if not isinstance(prompt, str):
            raise invalid(param, f"{param} is token ids; with suffix it must be text")
        return self._infilling.write(prompt, suffix)

    def _prompt(self, param: str, prompt: str | list[int], request: CompletionRequest, limits: RequestLimits) -> Prompt:
        if not isinstance(prompt, str):
            return Prompt(None, _truncate(prompt, request, limits, _DEFAULT_MAX_TOKENS))
        if self.tokenizer is None:
            raise invalid(param, f"{param} is text, but the server runs without a tokenizer: send token ids")
        token_ids = self._encode(param, prompt, request, limits, request.add_special_tokens is not False)
        if not token_ids:
            raise invalid(param, f"{param} is empty, and the model has no token to begin with")
        return Prompt(prompt, token_ids)

    def _encode(
        self,
        param: str,
        text: str,
        request: CompletionRequest | ChatRequest,
        limits: RequestLimits,
        add_special_tokens: bool,
    ) -> list[int]:
        """Refuses a text that is surely too long before it is tokenised: 8 MB would take seconds and a gigabyte. Where
        the prompt is truncated, text that is surely left out is not tokenised either."""
        assert self.tokenizer is not None
        longest, default = self._longest_token, _DEFAULT_MAX_TOKENS if param != "messages" else 1
        if longest is not None and len(text) > longest * limits.max_model_len:
            if request.truncate_prompt_tokens is None:
                message = _too_long(f"at least {-(-len(text) // longest)}", "at least 1", limits)
                raise ApiError(400, message, code="context_length_exceeded", param=param)
            most = longest * limits.max_model_len
            text = text[:most] if request.truncation_side == "right" else text[-most:]
        return _truncate(self.tokenizer.encode(text, add_special_tokens=add_special_tokens), request, limits, default)


def _truncate(
    token_ids: list[int], request: CompletionRequest | ChatRequest, limits: RequestLimits, default: int
) -> list[int]:
    """As truncate_prompt_tokens says. default: tokens of a completion whose request does not say how many."""
    most = request.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most == -1:
        wanted = default if request.max_new_tokens is None else request.max_new_tokens
        most = max(1, limits.max_model_len - wanted)
    return token_ids[:most] if request.truncation_side == "right" else token_ids[-most:]


def _prompt_name(i: int, num_prompts: int) -> str:
    return f"prompt[{i}]" if num_prompts > 1 else "prompt"


def _fit(num_prompt: int, asked: int | None, limits: RequestLimits, field: str, default: int | None = None) -> int:
    """max_tokens to use. asked: what the client gave; None: the default, or all the room where there is no default.
    ApiError 400 where prompt and completion do not fit: of max_tokens where a smaller value would help, else of field.
    """
    room = limits.max_model_len - num_prompt
    wanted = default if asked is None else asked
    if wanted is None and room >= 1:
        return room
    if wanted is not None and wanted <= max(room, 0):
        return wanted
    message = _too_long(str(num_prompt), "at least 1" if wanted is None else str(wanted), limits)
    param = "max_tokens" if asked is not None and room >= 1 else field
    raise ApiError(400, message, code="context_length_exceeded", param=param)


def _too_long(num_prompt: str, wanted: str, limits: RequestLimits) -> str:
    return (
        f"this model takes at most {limits.max_model_len} tokens; the request has {num_prompt} in the prompt and asks "
        f"for {wanted} in the completion. Shorten the prompt or lower max_tokens"
    )
