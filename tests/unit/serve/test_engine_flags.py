"""Flags of the engine: a field of EngineConfig each, with its default, its type and its checks."""

import argparse
from dataclasses import fields

import pytest

from eprt.config import EngineConfig
from eprt.serve import engine_flags
from eprt.serve.engine_flags import add_engine_flags, add_model_flag, engine_options
from eprt.serve.flags import parse_options
from tests.unit.cases import MODEL


def parser(*names: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_model_flag(made)
    add_engine_flags(made, *names)
    return made


def test_defaults_are_those_of_the_fields():
    assert parse_options(["--model", str(MODEL)]).engine == EngineConfig(str(MODEL))
    options = engine_options(parser(*engine_flags._FLAGS).parse_args(["--model", "m"]))
    assert EngineConfig(**options) == EngineConfig("m")


def test_the_server_has_a_flag_for_every_field():
    # hands_over is of servers of several instances: --decode says so.
    server = set(engine_flags._FLAGS) | {"model_dir", "enable_prefix_cache", "graph_sizes", "hands_over"}
    assert server == {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(
    "name, words, value",
    [
        ("kv_cache_gb", ["--kv-cache-gb", "0.5"], 0.5),
        ("max_model_len", ["--max-model-len", "64"], 64),
        ("quantization", ["--quantization", "int8"], "int8"),
        ("exact_combine", ["--exact-combine"], True),
        ("overlap_schedule", ["--no-overlap-schedule"], False),
        ("overlap_schedule", ["--overlap-schedule"], True),
        ("overlap_schedule", [], None),
    ],
)
def test_values_have_the_types_of_the_fields(name, words, value):
    options = engine_options(parser(name).parse_args(["--model", "m", *words]))
    assert options == {"model_dir": "m", name: value} and type(options[name]) is type(value)


def test_a_programs_own_flags_are_not_the_engines():
    made = parser("device")
    made.add_argument("--chat", action="store_true")
    assert engine_options(made.parse_args(["--model", "m", "--chat"])) == {"model_dir": "m", "device": "cpu"}
