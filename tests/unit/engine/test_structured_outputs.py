"""Structured outputs from request to answer: every answer of a random model has its form, whatever else it has."""

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from eprt import LLM, SamplingParams, StructuredOutputs
from eprt.engine import form_checker
from eprt.engine.outputs import RequestOutput
from tests import tiny
from tests.paths import DEMO
from tests.unit.engine.schema_cases import SCHEMAS, drawn_schemas

OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 999, "minimum": 0}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutputs(json=OBJECT),
    StructuredOutputs(regex="[a-f]{8,20}"),
    StructuredOutputs(choice=("one", "two two", "three")),
    StructuredOutputs(grammar='start: "a"+ "b"'),
    None,
    StructuredOutputs(json=OBJECT, after="</think>"),
]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> Path:
    """A random model with the demo model's tokenizer."""
    directory = tmp_path_factory.mktemp("random")
    tiny.save(tiny.make_model("v3", vocab_size=640, max_position_embeddings=512), directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO) / name, directory)
    return directory


def closing_bias(llm: LLM) -> dict[int, float]:
    """Favours what ends strings, numbers and lists, so that answers come to an end."""
    assert llm.tokenizer is not None
    wanted = {'"': 6, "}": 6, "]": 6, "b": 2, "@": 3, ".": 3, "/": 2, ":": 2, "0": 2, "1": 2, " ": -5, "\n": -9}
    texts = {token_id: llm.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in range(640)}
    return {1: 6.0, **{token_id: float(wanted[text]) for token_id, text in texts.items() if text in wanted}}


def check_all(schemas: dict[str, Any], outputs: list[RequestOutput]) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for (name, schema), output in zip(schemas.items(), outputs):
        for completion in output.outputs:
            where = f"{name}: {completion.text!r} ({completion.finish_reason}, {completion.error})"
            assert completion.finish_reason == "stop" and completion.text is not None, where
            errors = jsonschema.Draft202012Validator(schema, format_checker=checker).iter_errors(
                json.loads(completion.text)
            )
            assert not list(errors), where


@pytest.mark.parametrize("seed", [1, 2])
def test_every_answer_is_valid(random_model, seed):
    schemas = {**SCHEMAS, **{f"drawn {i}": schema for i, schema in enumerate(drawn_schemas(200, seed))}}
    with LLM(random_model, kv_cache_gb=0.05, max_num_seqs=64, max_model_len=400) as llm:
        bias = closing_bias(llm)
        params = [
            SamplingParams(
                max_tokens=390, temperature=1, seed=seed, logit_bias=bias, structured_outputs=StructuredOutputs(json=s)
            )
            for s in schemas.values()
        ]
        check_all(schemas, llm.generate(["x"] * len(schemas), params))
        llm.engine.check_integrity()


def generate(**options) -> tuple[list[list[int]], list[str | None]]:
    params = [
        SamplingParams(
            max_tokens=60,
            temperature=(0.0, 0.9, 1.6)[i % 3],
            seed=i,
            n=2 if i == 7 else 1,
            ignore_eos=i % 4 == 3,
            repetition_penalty=1.2 if i == 9 else 1.0,
            min_tokens=25 if i in (2, 8) else 0,
            logprobs=3 if i == 1 else None,
            structured_outputs=FORMS[i % len(FORMS)],
        )
        for i in range(12)
    ]
    with LLM(DEMO, **{"kv_cache_gb": 0.02, **options}) as llm:
        outputs = [
            completion for output in llm.generate(["Count to 9.", "Hello"] * 6, params) for completion in output.outputs
        ]
        llm.engine.check_integrity()
        assert not any(output.error for output in outputs)
        return [output.token_ids for output in outputs], [output.text for output in outputs]


@pytest.fixture(scope="module")
def expected():
    tokens, texts = generate()
    assert [len(text or "") for text in texts[1:3]] != [0, 0] and texts[2] in ("one", "two two", "three")
    assert json.loads(texts[0] or "").keys() == {"name", "n"}
    assert all(ids[-1] == 1 for ids, text in zip(tokens, texts) if text in ("one", "two two", "three"))
    return tokens, texts


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 5, "page_size": 4},
        {"kv_cache_gb": 3e-4, "page_size": 4, "max_model_len": 128},
        {"overlap_schedule": True},
        {"overlap_schedule": True, "kv_cache_gb": 3e-4, "page_size": 4, "max_model_len": 128},
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 3, "chunk_size": 16},
        {"num_speculative_tokens": 2, "kv_cache_gb": 4e-4, "page_size": 4, "max_model_len": 128},
    ],
    ids=["small chunks", "preempted", "overlapped", "overlapped, preempted", "draft", "drafts", "drafts, preempted"],
)
def test_tokens_are_those_without(expected, options):
    assert generate(**options) == expected


def test_drafts_that_are_drawn_keep_the_form():
    form, texts = StructuredOutputs(json=OBJECT), []
    with LLM(DEMO, kv_cache_gb=0.02, num_speculative_tokens=2, speculative_acceptance="rejection") as llm:
        params = [SamplingParams(max_tokens=80, temperature=1.5, seed=i, structured_outputs=form) for i in range(16)]
        texts = [output.outputs[0] for output in llm.generate(["Hello"] * 16, params)]
        assert llm.engine.stats().num_accepted_tokens > 0
    for output in texts:
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text or ""), OBJECT)
    assert sum(output.finish_reason == "stop" for output in texts) > 8


def test_a_request_goes_on_elsewhere_behind_what_it_has(expected):
    """As after the loss of a rank: prompt and generated tokens, with the same seed."""
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=1, structured_outputs=FORMS[1])
    tokens = expected[0][1]
    with LLM(DEMO, kv_cache_gb=0.02) as llm:
        assert llm.tokenizer is not None
        prompt = llm.tokenizer.encode("Hello")
        for num_generated in range(len(tokens) - 1):
            llm.engine.add_request(str(num_generated), prompt, params, generated=tokens[:num_generated])
        found: dict[str, list[int]] = {}
        while llm.engine.has_work:
            for output in llm.engine.step().outputs:
                found.setdefault(output.request_id, []).append(output.token_id)
    assert found == {str(i): tokens[i:] for i in range(len(tokens) - 1)}


def test_logprobs_are_of_the_raw_logits():
    form = StructuredOutputs(choice=("zebra",))
    with LLM(DEMO, kv_cache_gb=0.02) as llm:
        params = [SamplingParams(max_tokens=4, temperature=0, logprobs=5, structured_outputs=f) for f in (form, None)]
        held, free = (output.outputs[0] for output in llm.generate(["Hello"] * 2, params))
    assert held.top_logprobs is not None and free.top_logprobs is not None
    assert held.top_logprobs[0] == free.top_logprobs[0] and held.token_ids[0] != free.token_ids[0]
    assert held.logprobs is not None and held.logprobs[0] < -1


def test_fields_that_leave_no_token_end_the_request_with_a_reason():
    with LLM(DEMO, kv_cache_gb=0.02) as llm:
        params = SamplingParams(
            max_tokens=4, allowed_token_ids=(300,), structured_outputs=StructuredOutputs(regex="0+")
        )
        (output,) = llm.generate(["Hello"], params)
    assert output.outputs[0].finish_reason == "abort" and "no token can follow" in (output.outputs[0].error or "")


def test_a_grammar_that_exceeds_the_limits_ends_its_request_alone():
    names = {f"k{i}": {} for i in range(700)}
    wide = StructuredOutputs(json={"type": "object", "properties": names, "additionalProperties": False})
    with LLM(DEMO, kv_cache_gb=0.02) as llm:
        llm._form_checker = None  # as where limits are exceeded further on than it looks
        forms = (wide, StructuredOutputs(regex="[0-9]{3}"))
        params = [SamplingParams(max_tokens=8, structured_outputs=form) for form in forms]
        broken, other = (output.outputs[0] for output in llm.generate(["Hello"] * 2, params))
    assert broken.finish_reason == "abort" and "limits" in (broken.error or "")
    assert other.finish_reason == "stop" and len(other.text or "") == 3


def test_a_form_that_keeps_the_compiler_busy_is_refused(monkeypatch):
    monkeypatch.setattr(form_checker, "_MOST_CPU_S", 0.5)
    with LLM(DEMO, kv_cache_gb=0.02) as llm:
        form = StructuredOutputs(json={"type": "integer", "multipleOf": 999983})
        with pytest.raises(ValueError, match=r"prompt 0: it takes more than .* of processor time"):
            llm.generate("Hello", SamplingParams(structured_outputs=form))
        regex = SamplingParams(structured_outputs=StructuredOutputs(regex="[0-9]{3}"))
        assert len(llm.generate("Hello", regex)[0].outputs[0].text or "") == 3
        (process,) = filter(None, llm._form_checker._processes.queue)
    assert process._process.poll() == 0


def test_what_is_refused_is_refused_before_anything_runs(random_model):
    with LLM(random_model, kv_cache_gb=0.01, max_model_len=128) as llm:
        params = SamplingParams(structured_outputs=StructuredOutputs(json={"items": {"not": {}}}))
        with pytest.raises(ValueError, match='prompt 1: at /items: answers cannot be held to "not"'):
            llm.generate(["a", "b"], [SamplingParams(), params])
        assert not llm.engine.has_work
        # The engine itself, which the server asks, ends the request.
        llm.engine.add_request("r", [3], params)
        outputs = []
        while llm.engine.has_work:
            outputs += llm.engine.step().outputs
        assert [(o.finish_reason, o.token_id) for o in outputs] == [("abort", -1)] and "/items" in outputs[0].error
        llm.engine.add_request("r", [3], SamplingParams(structured_outputs=StructuredOutputs(regex="slow")))
        assert llm.engine.abort("r") and not llm.engine.has_work and not llm.engine.abort("r")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({}, "nothing given"),
        ({"json": {}, "regex": "a"}, "json and regex given"),
        ({"choice": []}, "at least one text"),
        ({"choice": "ab"}, "list"),
        ({"choice": [1]}, "list"),
        ({"regex": ""}, "not empty"),
        ({"regex": 3}, "text"),
        ({"json": {1: object()}}, "JSON schema"),
        ({"json_object": 3}, "True or False"),
        ({"regex": "a", "whitespace_pattern": " "}, "only for JSON"),
        ({"json": {}, "whitespace_pattern": 3}, "text"),
    ],
)
def test_wrong_fields_are_named(fields, words):
    with pytest.raises(ValueError, match=words):
        StructuredOutputs(**fields)


def test_forms_travel_and_compare_by_value():
    form = StructuredOutputs(json={"a": "é"}, whitespace_pattern="")
    assert form == StructuredOutputs(json='{"a": "é"}', whitespace_pattern="") and form.json == '{"a": "é"}'
    assert len({form, StructuredOutputs(choice=["a"]), StructuredOutputs(choice=("a",))}) == 2
    params = SamplingParams(structured_outputs=form)
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params
    assert StructuredOutputs(json=False).form == "json" and StructuredOutputs(json=True).json == "true"
    with pytest.raises(ValueError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
