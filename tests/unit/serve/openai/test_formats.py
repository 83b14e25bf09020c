"""Which parsers a checkpoint gets: those that it names in its own chat template or tokens, or none."""

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as HfTokenizer

from eprt.engine.tokenizer import Tokenizer
from eprt.serve.openai.encodings.deepseek_v4 import DeepSeekV4Encoding
from eprt.serve.openai.encodings.deepseek_v32 import DeepSeekV32Encoding
from eprt.serve.openai.formats import ModelFormats
from eprt.serve.openai.reasoning import reasoning_format_named
from eprt.serve.openai.tools import tool_format_named
from tests.unit.engine.tokenizer_cases import save_tokenizer
from tests.unit.serve.openai.template_cases import PLAIN, R1, V4, V31, template


def tokenizer_with(directory, *tokens: str) -> Tokenizer:
    tokenizer = HfTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.add_tokens([AddedToken(token, special=token.startswith("<｜")) for token in tokens])
    return save_tokenizer(tokenizer, directory)


def names(formats: ModelFormats) -> tuple[str, str]:
    return type(formats.tools).__name__, type(formats.reasoning).__name__


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        (V31, "DeepSeekV31Format", "DeepSeekV3Reasoning"),
        (R1, "DeepSeekV3Format", "DeepSeekR1Reasoning"),
        (V4, "DeepSeekV4Format", "DeepSeekV4Reasoning"),
        (V4.replace("tool_calls", "function_calls"), "DeepSeekV32Format", "DeepSeekV4Reasoning"),
        (PLAIN, "HermesFormat", "NoneType"),
        (PLAIN + "{% if enable_thinking %}<think>{% endif %}", "HermesFormat", "DeepSeekV3Reasoning"),
        ("{{ raise_exception('no') }}<tool_call>", "HermesFormat", "NoneType"),
    ],
)
def test_the_chat_template_shows_both(source, tools, reasoning, tmp_path):
    tokenizer = tokenizer_with(tmp_path, "<｜tool▁call▁begin｜>") if "Deep" in tools else tokenizer_with(tmp_path)
    assert names(ModelFormats.from_checkpoint(tokenizer, template(source))) == (tools, reasoning)


@pytest.mark.parametrize(
    ("token", "tools"),
    [("<｜tool▁call▁begin｜>", "DeepSeekV3Format"), ("｜DSML｜", "DeepSeekV32Format"), ("x", "HermesFormat")],
)
def test_tokens_speak_where_the_template_prints_no_calls(token, tools, tmp_path):
    for chat in (None, template(PLAIN)):
        assert names(ModelFormats.from_checkpoint(tokenizer_with(tmp_path, token), chat)) == (tools, "NoneType")


def test_flags_win(tmp_path):
    tokenizer = tokenizer_with(tmp_path)
    formats = ModelFormats.from_checkpoint(tokenizer, template(V31), "none", "none")
    assert formats == ModelFormats(None, None) and not formats.has_special_marks(tokenizer)
    formats = ModelFormats.from_checkpoint(tokenizer, template(V31), "hermes", "deepseek_r1")
    assert names(formats) == ("HermesFormat", "DeepSeekR1Reasoning")


def test_a_special_token_in_a_mark_is_found(tmp_path):
    tokenizer = tokenizer_with(tmp_path, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    assert ModelFormats(tools=tool_format_named("deepseek_v31")).has_special_marks(tokenizer)
    assert not ModelFormats(reasoning=reasoning_format_named("deepseek_r1")).has_special_marks(tokenizer)


def test_an_encoding_knows_both(tmp_path):
    tokenizer = tokenizer_with(tmp_path)
    v32 = ModelFormats.from_checkpoint(tokenizer, DeepSeekV32Encoding())
    assert names(v32) == ("DeepSeekV32Format", "DeepSeekV3Reasoning")
    v4 = ModelFormats.from_checkpoint(tokenizer, DeepSeekV4Encoding())
    assert names(v4) == ("DeepSeekV4Format", "DeepSeekV4Reasoning")
    assert ModelFormats.from_checkpoint(tokenizer, DeepSeekV4Encoding(), "none", "none") == ModelFormats()
