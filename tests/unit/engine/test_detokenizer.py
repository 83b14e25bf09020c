"""Detokenizers: the text of tokens that arrive one by one equals that of all of them decoded at once."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eprt.engine.detokenizer import ByteDetokenizer, WindowDetokenizer, new_detokenizer


def _incremental(detokenizer, ids: list[int]) -> str:
    return "".join(map(detokenizer.add_token, ids)) + detokenizer.finish()


@pytest.mark.parametrize("skip", [True, False])
def test_byte_detokenizer_equals_full_decode_on_any_ids(byte_level, skip):
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(byte_level._tokenizer.get_vocab_size()) for _ in range(draw.randrange(60))]
        expected = byte_level.decode(ids, skip_special_tokens=skip)
        assert _incremental(new_detokenizer(byte_level, skip_special_tokens=skip), ids) == expected, ids


def test_no_half_character_is_ever_shown(byte_level):
    detokenizer = new_detokenizer(byte_level)
    pieces = [detokenizer.add_token(i) for i in byte_level.encode("🧪漢ß")]
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces) and "".join(pieces) == "🧪漢ß"


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="�"), max_size=40))
def test_window_detokenizer_equals_full_decode_on_text(byte_fallback, byte_level, text):
    for tokenizer in (byte_fallback, byte_level):
        ids = tokenizer.encode(text)
        assert _incremental(WindowDetokenizer(tokenizer, True), ids) == tokenizer.decode(ids)


def test_window_detokenizer_lets_invalid_bytes_go_after_four_tokens(byte_fallback):
    invalid = byte_fallback._tokenizer.token_to_id("<0xFF>")
    detokenizer = new_detokenizer(byte_fallback)
    assert isinstance(detokenizer, WindowDetokenizer)
    assert "\N{REPLACEMENT CHARACTER}" in "".join(detokenizer.add_token(invalid) for _ in range(4))


def test_the_kind_follows_the_tokenizer(byte_level, byte_fallback):
    assert isinstance(new_detokenizer(byte_level), ByteDetokenizer)
    assert isinstance(new_detokenizer(byte_fallback), WindowDetokenizer)
