"""Tokenizers that several test files share."""

import pytest

from eprt.engine.tokenizer import Tokenizer
from tests.unit.engine.tokenizer_cases import save_with_config, train_byte_fallback, train_byte_level


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory) -> Tokenizer:
    return save_with_config(train_byte_level(), tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    return save_with_config(train_byte_fallback(), tmp_path_factory.mktemp("byte_fallback"))
