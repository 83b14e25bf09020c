"""Which template a checkpoint gets: a file's, its own, or the encoding of its model's type."""

import json

import pytest

from eprt.serve.openai.chat import ChatTemplate
from eprt.serve.openai.encodings.deepseek_v4 import DeepSeekV4Encoding
from eprt.serve.openai.encodings.deepseek_v32 import DeepSeekV32Encoding
from eprt.serve.openai.templates import find_template, read_template_file
from tests.unit.engine.tokenizer_cases import save_tokenizer, train_byte_level


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(train_byte_level(["a b"], 260), tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("deepseek_v32", DeepSeekV32Encoding), ("deepseek_v4", DeepSeekV4Encoding), ("deepseek_v3", type(None))],
)
def test_a_model_without_a_template_gets_the_encoding_of_its_type(model_type, kind, tokenizer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert type(find_template(tmp_path, tokenizer)) is kind
    (tmp_path / "chat_template.jinja").write_text("its own")
    assert type(find_template(tmp_path, tokenizer)) is ChatTemplate, "V3.2-Exp has a template, and is of this type too"


def test_without_anything_there_is_none(tokenizer, tmp_path):
    assert find_template(tmp_path, tokenizer) is None


def test_a_file_wins(tokenizer, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("its own")
    (tmp_path / "mine").write_text("{{ bos_token }}mine é", encoding="utf-8")
    template = find_template(tmp_path, tokenizer, str(tmp_path / "mine"))
    assert template is not None and template.render([]) == "mine é"


def test_a_file_that_is_no_template_is_named(tmp_path):
    with pytest.raises(ValueError, match="gone: No such file"):
        read_template_file(str(tmp_path / "gone"), {})
    path = tmp_path / "bad"
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="bad: not text in UTF-8"):
        read_template_file(str(path), {})
    path.write_text("one\n{% if %}")
    with pytest.raises(ValueError, match="bad: the chat template has an error in line 2"):
        read_template_file(str(path), {})
