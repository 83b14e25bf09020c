"""Grammars: what is taken, what is refused and with which words, and which tokens may follow."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from eprt.config import EngineConfig
from eprt.engine import grammars as grammars_module
from eprt.engine.grammars import GrammarError, Grammars, MaskRows
from eprt.engine.structured_outputs import FramedCalls, StructuredOutputs
from eprt.engine.tokenizer import Tokenizer
from eprt.model_config import ModelConfig
from eprt.models.hf_config import read_model_config
from tests.paths import DEMO
from tests.unit.engine.schema_cases import REFUSED, SCHEMAS, drawn_schemas


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars.from_checkpoint(DEMO, read_model_config(EngineConfig(DEMO)))


def fits(grammars: Grammars, tokenizer: Tokenizer, text: str, **form) -> bool:
    """Whether a completion may be this text."""
    matcher = grammars.compile(StructuredOutputs(**form)).deep_copy()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def test_every_schema_of_the_set_compiles(grammars):
    schemas = [*SCHEMAS.values(), *drawn_schemas(200)]
    assert len(schemas) > 250
    for schema in schemas:
        grammars.compile(StructuredOutputs(json=schema))


@pytest.mark.parametrize("schema, path, words", REFUSED, ids=[json.dumps(schema)[:60] for schema, *_ in REFUSED])
def test_what_cannot_be_enforced_is_refused_with_its_place(grammars, schema, path, words):
    with pytest.raises(GrammarError) as refused:
        grammars.compile(StructuredOutputs(json=schema))
    message = str(refused.value)
    assert words in message
    assert message.startswith(f"at {path}: ") if path else not message.startswith("at ")
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    "form, good, bad",
    [
        ({"regex": "[a-c]+x"}, ["abx", "ax"], ["x", "abxx", "abd"]),
        ({"regex": "^a|b$"}, ["a", "b"], ["ab"]),
        ({"choice": ['a"b', "x\ny", "日本", "a\\d", "", "/"]}, ['a"b', "x\ny", "日本", "a\\d", "", "/"], ["a", "z"]),
        ({"grammar": 'start: "a" N\nN: /[0-9]+/'}, ["a1", "a42"], ["a", "1"]),
        ({"grammar": 'root ::= "x" digit+\ndigit ::= [0-9]'}, ["x1", "x99"], ["x", "9"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a": }']),
        ({"json": {"type": "integer", "maximum": 9}}, ["7", "-3"], ["10", "1.5", '"1"']),
        (
            {"json": '{"const": {"a": 1}}'},
            ['{"a": 1}', '{"a":1}', '{ "a" : 1 }'],
            ['{"a":  1}', '{"a": 2}', '{\n"a": 1}'],
        ),
        ({"json": {"const": {"a": 1}}, "whitespace_pattern": ""}, ['{"a":1}'], ['{"a": 1}']),
        ({"json": {"const": {"a": 1}}, "whitespace_pattern": "[ \\n]*"}, ['{\n  "a": 1\n}'], ['{\t"a": 1}']),
        (
            {"json": {"type": "string", "format": "date"}},
            ['"2024-02-29"', '"2000-02-29"', '"0001-12-31"', '"1999-04-30"'],
            ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"', '"1999-04-31"', '"1999-13-01"', '"1999-1-01"'],
        ),
        (
            {"json": {"type": "string", "format": "date-time"}},
            ['"2024-02-29T23:59:59.5Z"', '"2024-01-01T00:00:00-05:30"'],
            ['"2024-02-30T00:00:00Z"', '"2024-01-01T24:00:00Z"', '"2024-01-01T00:00:00"'],
        ),
        ({"regex": "ab?", "after": "</think>"}, ["hm</think>ab", "</think>a"], ["ab", "hm</think>b", "a</think>"]),
        ({"json": {"type": "null"}, "after": "END"}, ["so ENDnull", "ENDnull"], ["null", "ENDEND"]),
        ({"choice": ["y"], "after": "</think>"}, ["1\n2</think>y"], ["y"]),
        ({"grammar": 'start: "q"', "after": "</think>"}, ["1\n2</think>q"], ["q"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_forms(grammars, tokenizer, form, good, bad):
    assert [fits(grammars, tokenizer, text, **form) for text in good] == [True] * len(good)
    assert [fits(grammars, tokenizer, text, **form) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    "form, words",
    [
        ({"regex": "a(?=b)"}, "look"),
        ({"json": {"allOf": 3}}, "schema"),
        ({"json": {"type": "object", "properties": {"a": {}}, "required": [["a"]]}}, "schema|required"),
        ({"json": {"type": "string", "format": ["date"]}}, "format"),
        ({"regex": "("}, "unclosed"),
        ({"regex": "(" * 10_000}, "regex"),
        ({"grammar": "start: undefined_rule"}, "undefined_rule"),
        ({"grammar": 'root ::= "a'}, "GBNF"),
        ({"json": '{"type": "integer"'}, "not JSON"),
        ({"json": "[" * 5000 + "]" * 5000}, "JSON|nested"),
        ({"json": '{"items":' * 400 + "{}" + "}" * 400}, "nested too deeply"),
        ({"json": {"enum": ["x" * 1000] * 300}}, "at most 256000"),
    ],
)
def test_what_cannot_be_compiled_is_refused(grammars, form, words):
    with pytest.raises(GrammarError, match=words):
        grammars.compile(StructuredOutputs(**form))


def test_rules_that_name_each_other_ten_thousand_times_do_no_harm(grammars, tokenizer):
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(10_000))
    assert fits(grammars, tokenizer, "a", grammar=f'start: r0\n{rules}\nr10000: "a"')


def test_many_choices_are_one_terminal(grammars, tokenizer):
    assert fits(grammars, tokenizer, "4999", choice=[str(i) for i in range(5000)])


def test_kept_grammars_are_bounded_and_the_same(grammars):
    first = StructuredOutputs(regex="kept")
    made = grammars.compile(first)
    assert grammars.compile(StructuredOutputs(regex="kept")) is made is grammars.find(first)
    for i in range(300):
        grammars.compile(StructuredOutputs(choice=[str(i)]))
    assert grammars.find(first) is None


def test_threads_compile_the_same_grammar_once(tokenizer):
    grammars = Grammars(lambda: tokenizer, 640, [1])
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(grammars.compile, [StructuredOutputs(regex="a+")] * 16))
    assert all(matcher is made[0] for matcher in made)


def test_masks_are_of_the_models_vocabulary(grammars, tokenizer):
    assert grammars.mask_bytes == 80 and Grammars(lambda: tokenizer, 700, [1]).mask_bytes == 88
    assert np.flatnonzero(np.unpackbits(grammars.eos_B, bitorder="little")).tolist() == [1]


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"const": {"name": "abc def"}}},
        {"json": {"enum": ["Oslo", "Osaka"]}},
        {"choice": ["one two three"]},
        {"regex": "same text[0-9]"},
        {"grammar": 'start: "a long word" | "a long day"'},
        {"json": {"type": "boolean"}, "after": "</think>"},
    ],
)
def test_where_a_text_is_certain_each_way_to_spell_it_may_follow(grammars, form):
    """A mask allows the tokens that a question about one token allows, and no fewer."""
    rng, num_spelled = np.random.default_rng(0), 0
    for _ in range(4):
        matcher = grammars.compile(StructuredOutputs(**form)).deep_copy()
        while not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed_V = np.unpackbits(bits, bitorder="little", count=640) == 1
            asked_V = np.array([matcher.validate_tokens([token]) == 1 for token in range(640)])
            assert (allowed_V == asked_V).all()
            num_spelled += allowed_V.sum() > 1
            assert matcher.consume_token(int(rng.choice(np.flatnonzero(allowed_V))))
    assert num_spelled


def masks_along(grammars: Grammars, schema, num_tokens: int = 12) -> list[bytes]:
    matcher, rng, masks = grammars.compile(StructuredOutputs(json=schema)).deep_copy(), np.random.default_rng(0), []
    while len(masks) < num_tokens and not matcher.is_stopped():
        masks.append(matcher.compute_bitmask())
        (allowed,) = np.unpackbits(np.frombuffer(masks[-1], np.uint8), bitorder="little").nonzero()
        assert matcher.consume_token(int(rng.choice(allowed)))
    return masks


def test_masks_do_not_depend_on_slices(grammars, monkeypatch):
    monkeypatch.setattr(grammars_module, "_UNSLICED", 0)
    sliced = Grammars.from_checkpoint(DEMO, read_model_config(EngineConfig(DEMO)))
    for schema in [*SCHEMAS.values(), *drawn_schemas(20)]:
        assert masks_along(sliced, schema) == masks_along(grammars, schema), schema


def test_a_token_that_does_not_fit_is_an_error_of_its_matcher_alone(grammars, tokenizer):
    first = grammars.compile(StructuredOutputs(regex="[ab]*c"))
    matchers = [first.deep_copy() for _ in range(3)]
    good, bad = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "az")
    masks = MaskRows.allocate(3, grammars.mask_bytes)
    grammars.fill_masks(matchers, [good, bad, good], masks, in_threads=False)
    assert [matcher.is_error() for matcher in matchers] == [False, True, False]
    want = first.deep_copy()
    want.consume_token(good)
    assert masks.bits_YB[0].tobytes() == masks.bits_YB[2].tobytes() == want.compute_bitmask()[: grammars.mask_bytes]


def test_checkpoints_without_tokenizer_or_end_token_are_refused(tmp_path):
    config: ModelConfig = read_model_config(EngineConfig(DEMO))
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        Grammars.from_checkpoint(tmp_path, config).compile(StructuredOutputs(regex="a"))


SCHEMA = json.dumps({"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False})
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
OTHER = CALL.replace('"f"', '"g"')


@pytest.mark.parametrize("begin, end", [("<tool_call>", "</tool_call>"), ("[CALL]", "[END]")], ids=["tokens", "text"])
@pytest.mark.parametrize(
    "options, good, bad",
    [
        ({}, [CALL, OTHER], ["hello", CALL + "\n" + CALL, "x" + CALL, CALL.replace("1", '"1"')]),
        ({"many": True, "between": "\n"}, [CALL, CALL + "\n" + OTHER], [CALL + OTHER, ""]),
        ({"required": False}, ["hello", "", CALL, "x\n" + CALL], [CALL + "x", CALL + "\n" + CALL]),
        ({"required": False, "many": True, "between": "\n"}, ["a" + CALL + "\n" + OTHER], [CALL + OTHER]),
        ({"section_begin": "<S>", "section_end": "<E>"}, ["<S>" + CALL + "<E>"], [CALL, "<S>" + CALL]),
        (
            {"section_begin": "<S>", "section_end": "<E>", "required": False, "many": True},
            ["hi", "hi<S>" + CALL + OTHER + "<E>"],
            ["hi<S>" + CALL, "hi<S>x"],
        ),
    ],
)
def test_framed_calls(grammars, tokenizer, begin, end, options, good, bad):
    def marked(text: str) -> str:
        return text.replace("<tool_call>", begin).replace("</tool_call>", end)

    frames = [
        (marked(f'<tool_call>{{"name": "{name}", "arguments": '), SCHEMA, marked("}</tool_call>")) for name in "fg"
    ]
    form = {"calls": FramedCalls(tuple(frames), **options)}
    assert [fits(grammars, tokenizer, marked(text), **form) for text in good] == [True] * len(good)
    assert [fits(grammars, tokenizer, marked(text), **form) for text in bad] == [False] * len(bad)


def test_tokens_that_may_stand_in_the_text_before_calls(grammars, tokenizer):
    frames = (('<tool_call>{"name": "f", "arguments": ', SCHEMA, "}</tool_call>"),)
    text = "<think>so</think>hello"
    assert not fits(grammars, tokenizer, text, calls=FramedCalls(frames, required=False))
    allowed = FramedCalls(frames, required=False, in_text=("<think>", "</think>", "<absent>"))
    assert fits(grammars, tokenizer, text, calls=allowed) and fits(grammars, tokenizer, text + CALL, calls=allowed)
