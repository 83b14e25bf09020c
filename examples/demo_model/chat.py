"""Conversations as text: the same text as `chat_template.jinja` gives, split where the training loss starts and stops.

Training renders tens of millions of messages, which the jinja template would take hours for; a test compares the two.
"""

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, TOOL = "<｜User｜>", "<｜Assistant｜>", "<｜Tool｜>"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Single tokens that stay visible in decoded text."""

Segment = tuple[str, bool]
"""A piece of text, and whether the model is trained to write it."""


def render(messages, tools=(), add_generation_prompt: bool = True) -> str:
    """The prompt of a conversation of OpenAI messages and tool declarations."""
    text = "".join(piece for piece, _ in segments(messages, tools))
    return text + ASSISTANT if add_generation_prompt else text


def segments(messages, tools=()) -> list[Segment]:
    """A conversation cut into pieces; what assistants say (with the end mark) is trained on.

    A message with the extra key "untrained" is context only.
    """
    head = BOS + "".join(message["content"] + "\n" for message in messages if message["role"] == "system")
    for tool in tools or ():
        function = tool["function"]
        names = ", ".join(function["parameters"]["properties"])
        head += f"Tool: {function['name']}({names}): {function['description']}\n"
    pieces: list[Segment] = [(head, False)]
    for message in messages:
        if message["role"] == "user":
            pieces.append((USER + message["content"], False))
        elif message["role"] == "tool":
            pieces.append((TOOL + message["content"], False))
        elif message["role"] == "assistant":
            calls = "".join(call_text(call["function"]) for call in message.get("tool_calls", ()))
            pieces.append((ASSISTANT, False))
            pieces.append((message["content"] + calls + EOS, not message.get("untrained", False)))
    return pieces


def call_text(function: dict) -> str:
    """The text of a tool call whose arguments are a JSON string, as OpenAI clients send it."""
    return f'<tool_call>{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}</tool_call>'
