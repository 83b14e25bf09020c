"""FormChecker: forms that keep the compiler busy, or take all memory, are refused; others are checked as before."""

import json

import pytest

from eprt.engine import form_checker
from eprt.engine.form_checker import FormChecker
from eprt.engine.structured_outputs import StructuredOutputs
from eprt.engine.tokenizer import Tokenizer
from tests.paths import DEMO

OBJECT = StructuredOutputs(json='{"type": "object"}')
RULES = [f"r{i}" for i in range(2500)]
MANY_RULES = "\n".join(["start: " + " | ".join(RULES), *(f'{rule}: "{rule}"' for rule in RULES)])


def schema(**words) -> StructuredOutputs:
    return StructuredOutputs(json=json.dumps(words))


@pytest.fixture(scope="module")
def checker() -> FormChecker:
    return FormChecker(Tokenizer(DEMO))


def test_forms_that_can_be_enforced_are_not_refused(checker):
    assert checker.find(OBJECT) is None
    regexes = [StructuredOutputs(regex=regex) for regex in ("(a*)*b", "(a?){1000}a{1000}")]
    for outputs in (OBJECT, *regexes, StructuredOutputs(choice=[f"c{i}" for i in range(999)])):
        assert checker.why_refused(outputs) == "" == checker.find(outputs)


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        (schema(type="string", pattern="("), "unclosed group"),
        (schema(**{"$ref": "#"}), "it refers to itself without end"),
        (schema(type="integer", minimum=5, maximum=4), "minimum"),
        (StructuredOutputs(grammar=MANY_RULES), "bounds of its compiler"),
    ],
    ids=["a wrong pattern", "a loop", "an empty range", "behind the first token"],
)
def test_what_the_compiler_refuses_is_told(outputs, why, checker):
    assert why in checker.why_refused(outputs)


def test_a_form_that_keeps_the_compiler_busy_ends_its_process_alone(monkeypatch):
    monkeypatch.setattr(form_checker, "_MOST_CPU_S", 0.5)
    checker = FormChecker(Tokenizer(DEMO))
    assert "of processor time" in checker.why_refused(schema(type="integer", multipleOf=999983))
    assert checker.why_refused(OBJECT) == ""


def test_no_process_is_no_refusal(monkeypatch):
    checker = FormChecker(Tokenizer(DEMO))
    monkeypatch.setattr(form_checker.sys, "executable", "/nowhere/python")
    for _ in range(3):
        with pytest.raises(OSError):
            checker.why_refused(OBJECT)
    monkeypatch.undo()
    assert checker.why_refused(OBJECT) == ""


def test_a_process_that_was_killed_is_replaced(checker):
    assert checker.why_refused(schema(type="null")) == ""
    for process in checker._processes.queue:
        if process is not None:
            process._process.kill()
            process._process.wait()
    assert "of processor time" in checker.why_refused(schema(type="boolean"))
    assert checker.why_refused(schema(type="number")) == ""
