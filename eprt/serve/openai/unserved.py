"""Unserved fields: what OpenAI, vLLM or SGLang know and eprt does not do, with the values that are accepted anyway.

A value is accepted if it asks for what happens anyway: null, an empty text, list or object, and those listed here.
Any other is refused by name, because ignoring it would change the answer. docs/openai.md has the same list (a test
compares).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eprt.serve.errors import ApiError, quoted, unsupported


@dataclass(frozen=True)
class Unserved:
    """One field."""

    why: str  # continues "eprt does not support NAME=VALUE: "
    accepted: tuple[Any, ...] = ()  # beside null and what is empty
    instead: str = ""  # the field to use

    def accepts(self, value: Any) -> bool:
        return value is None or value in ([], {}, "") or any(_equal(value, each) for each in self.accepted)

    def refusal(self, name: str, value: Any) -> ApiError:
        only = f"; accepted only as {' or '.join(map(quoted, self.accepted))}" if self.accepted else ""
        use = f"; use {self.instead}" if self.instead else ""
        return unsupported(name, f"eprt does not support {name}={quoted(value)}: {self.why}{only}{use}")


def _equal(value: Any, accepted: Any) -> bool:
    """1 is not true, but it is 1.0."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


_BEAMS = "there is no beam search: a token is chosen once, and a beam would have to be taken back"
_CODE = "a server does not run its clients' programs"
_IN_TEXT = "prompts are text or token ids"
_ONE_PLACE = "prompts and answers are computed in one place"

BOTH: Mapping[str, Unserved] = {
    "cache_salt": Unserved("prefixes are shared between all requests; --no-prefix-cache shares none"),
    "custom_logit_processor": Unserved(_CODE),
    "custom_params": Unserved("they are for custom logit processors"),
    "data_parallel_rank": Unserved("the server chooses the rank", instead="prompt_cache_key"),
    "early_stopping": Unserved(_BEAMS, (False,)),
    "extra_key": Unserved("prefixes are shared between all requests; --no-prefix-cache shares none"),
    "kv_transfer_params": Unserved("KV caches stay on their rank"),
    "length_penalty": Unserved(_BEAMS, (1.0,)),
    "logits_processors": Unserved(_CODE),
    "lora_path": Unserved("there are no adapters"),
    "mm_processor_kwargs": Unserved(_IN_TEXT),
    "repetition_detection": Unserved("nothing looks for repetitions", instead="repetition_penalty"),
    "return_hidden_states": Unserved("hidden states stay on the ranks", (False,)),
    "return_routed_experts": Unserved("GET /v1/eprt/load tells the experts' load", (False,)),
    "session_params": Unserved("requests stand alone", instead="prompt_cache_key"),
    "stop_regex": Unserved("stop strings are plain text", instead="stop"),
    "store": Unserved("nothing is stored", (False,)),
    "structural_tag": Unserved("calls of tools are the only text in tags", instead="tools"),
    "use_beam_search": Unserved(_BEAMS, (False,), instead="n"),
    "vllm_xargs": Unserved("they are for plugins of vLLM"),
    # For what such servers are apart from a model: disaggregation, routers in front of them, renderers.
    "bootstrap_host": Unserved(_ONE_PLACE),
    "bootstrap_port": Unserved(_ONE_PLACE),
    "bootstrap_room": Unserved(_ONE_PLACE),
    "custom_labels": Unserved("metrics have no labels of clients", instead="metadata"),
    "disagg_prefill_dp_rank": Unserved(_ONE_PLACE),
    "ec_transfer_params": Unserved(_ONE_PLACE),
    "images_config": Unserved(_IN_TEXT),
    "logprob_token_ids": Unserved("log-probabilities are of the likeliest tokens", instead="logprobs"),
    "ngram_corpus_id": Unserved("drafts come from the model (--num-speculative-tokens)"),
    "return_cached_tokens_details": Unserved("usage.prompt_tokens_details has cached_tokens", (False,)),
    "return_mm_kwargs": Unserved("there is no rendering without generation", (True,)),
    "return_token_offsets": Unserved("there is no rendering without generation", (False,), instead="/tokenize"),
    "routed_dp_rank": Unserved("the server chooses the rank", instead="prompt_cache_key"),
    "routed_experts_prompt_start": Unserved("GET /v1/eprt/load tells the experts' load", (0,)),
    "routed_experts_start_len": Unserved("GET /v1/eprt/load tells the experts' load", (0,)),
    "stream_interval": Unserved("each step's tokens are sent at once", (1,)),
    "thinking_token_budget": Unserved("nothing ends a model's reasoning", (-1,), instead="max_tokens"),
    "watermarking": Unserved("answers have no watermark", (False,)),
}
COMPLETION: Mapping[str, Unserved] = {
    **BOTH,
    "prompt_embeds": Unserved(_IN_TEXT),
}
CHAT: Mapping[str, Unserved] = {
    **BOTH,
    "audio": Unserved("answers are text"),
    "function_call": Unserved("it is an old name", ("none", "auto"), instead="tool_choice"),
    "functions": Unserved("it is an old name", instead="tools"),
    "media_io_kwargs": Unserved("messages are text"),
    "modalities": Unserved("answers are text", (["text"],)),
    "moderation": Unserved("nothing is moderated"),
    "prediction": Unserved("drafts come from the model (--num-speculative-tokens)"),
    "prompt_cache_options": Unserved("prefixes are kept for as long as there is room"),
    "prompt_cache_retention": Unserved("prefixes are kept for as long as there is room", ("in_memory", "in-memory")),
    "stream_reasoning": Unserved("reasoning streams like the rest", (True,)),
    "verbosity": Unserved("the model has no such switch", ("medium",)),
    "web_search_options": Unserved("nothing is looked up"),
    "input_ids": Unserved("/v1/completions takes token ids", instead="messages"),
    "max_dynamic_patch": Unserved("messages are text"),
    "min_dynamic_patch": Unserved("messages are text"),
    "reasoning": Unserved("it is a field of /v1/responses", instead="reasoning_effort"),
    "return_meta_info": Unserved("the answer has what there is", (False,)),
    "return_prompt_text": Unserved("POST /tokenize tells the prompt's tokens", (False,)),
    "return_prompt_token_ids": Unserved("they come with the answer's", (False,), instead="return_token_ids"),
    "task": Unserved("the model has no such switch", instead="messages"),
    "use_audio_in_video": Unserved("messages are text", (False,)),
}
# Values with which a served field asks for nothing, where it comes to the endpoint that does not have it.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "enable_thinking": (False,),
    "include_reasoning": (True,),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "separate_reasoning": (True,),
    "suffix": ("",),
    "thinking": (False,),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
}
