"""Chat templates against transformers' apply_chat_template; templates that refuse, and where they are looked for."""

import json

import msgspec
import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import ApiError
from eprt.serve.openai.chat import ChatTemplate
from eprt.serve.openai.protocol import Message, Tool

PLAIN = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}[S]{{ m.content }}{% continue %}{% endif %}
{%- generation %}<{{ m.role }}>{{ m.content | trim if m.content else '' }}{% endgeneration %}
{%- for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if thinking is defined and thinking %}<think>{% endif %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

# As DeepSeek V3's: the arguments are joined to text, so they must be text.
JOINS_TEXT = """{% for m in messages %}{{ m['role'] + ':' + (m['content'] or '') }}
{%- for c in m['tool_calls'] or [] %}{{ c['function']['name'] + '=' + c['function']['arguments'] }}{% endfor %}
{%- endfor %}"""

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Größe <b>&</b> 漢字? "},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 1, "a": "ü"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}]


def _checkpoint(folder, template) -> Tokenizer:
    HfTokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def _messages(raw) -> list[Message]:
    return msgspec.convert(raw, list[Message])


def _with_objects(raw):
    """transformers renders what it is given; templates that print JSON want a call's arguments as an object."""
    raw = json.loads(json.dumps(raw))
    for message in raw:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return raw


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_transformers(tmp_path, tools, add_generation_prompt):
    from transformers import AutoTokenizer

    template = ChatTemplate.from_checkpoint(tmp_path, _checkpoint(tmp_path, PLAIN))
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        _with_objects(MESSAGES), tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, thinking=True
    )
    assert template is not None
    rendered = template.render(
        _messages(MESSAGES),
        msgspec.convert(tools, list[Tool] | None),
        add_generation_prompt=add_generation_prompt,
        variables={"thinking": True},
    )
    assert rendered == expected and "<s>" in rendered and "漢字" in rendered


def test_arguments_as_text_where_the_template_joins_them(tmp_path):
    template = ChatTemplate(JOINS_TEXT, {})
    assert 'add={"b": 1, "a": "ü"}' in template.render(_messages(MESSAGES))


def test_files_take_precedence_and_named_templates_are_chosen(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = _checkpoint(tmp_path, [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}])
    template = ChatTemplate.from_checkpoint(tmp_path, tokenizer)
    assert template is not None
    assert template.render(_messages(MESSAGES)) == "D"
    assert template.render(_messages(MESSAGES), msgspec.convert(TOOLS, list[Tool])) == "T"
    (tmp_path / "chat_template.jinja").write_text("J")
    from_file = ChatTemplate.from_checkpoint(tmp_path, tokenizer)
    assert from_file is not None and from_file.render(_messages(MESSAGES)) == "J"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("N")
    named = ChatTemplate.from_checkpoint(tmp_path, tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for tools, want in ((None, "J"), (TOOLS, "N")):
        assert theirs.apply_chat_template(_with_objects(MESSAGES), tools=tools, tokenize=False) == want
        assert named is not None
        assert named.render(_messages(MESSAGES), msgspec.convert(tools, list[Tool] | None)) == want
    assert ChatTemplate.from_checkpoint(tmp_path / "elsewhere", _checkpoint(tmp_path, None)) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.foo.bar }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_refuses_or_escapes_is_the_clients_error(source):
    with pytest.raises(ApiError, match="chat template") as caught:
        ChatTemplate(source, {}).render(_messages(MESSAGES))
    assert caught.value.status == 400


def test_developer_is_system_and_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rendered = ChatTemplate("{{ messages[0].role }} {{ messages[0].content }}", {}).render(
        _messages([{"role": "developer", "content": parts}])
    )
    assert rendered == "system ab"
