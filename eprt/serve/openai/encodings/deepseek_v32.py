"""DeepSeek-V3.2's prompts: thoughts stand only behind the last user's message, results of tools in a block.

    <bos>SYSTEM<｜User｜>QUESTION<｜Assistant｜><think>THOUGHTS</think>ANSWER

    <｜DSML｜function_calls>...</｜DSML｜function_calls><eos>

    <function_results>
    <result>RESULT</result>
    </function_results>

    <think>

Source: encoding/encoding_dsv32.py of the checkpoint. Beyond it: results are put into the order of the calls that they
name, and an assistant's message behind the last user's may lack thoughts. Knows nothing of generated text.
"""

from pathlib import Path
from typing import Any

from eprt.serve.errors import invalid, quoted
from eprt.serve.openai.encodings.dsml import (
    ASSISTANT,
    BOS,
    EOS,
    SWITCHES,
    USER,
    is_on,
    with_tools,
    write_calls,
    write_schemas,
)
from eprt.serve.openai.prompt_template import PromptTemplate, text_of
from eprt.serve.openai.protocol import Message, Tool
from eprt.serve.openai.reasoning import BEGIN, END

_SECTION = "function_calls"
_TOOLS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
SCHEMAS
</functions>
"""  # noqa: E501  # the model was trained on these lines


class DeepSeekV32Encoding(PromptTemplate):
    """Thinks only where a request asks for it."""

    variables = SWITCHES
    tool_format = "deepseek_v32"
    reasoning_format = "deepseek_v3"

    @staticmethod
    def from_checkpoint(model_dir: Path) -> "DeepSeekV32Encoding":
        return DeepSeekV32Encoding()

    def render(
        self,
        messages: list[Message],
        tools: list[Tool] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        messages = with_tools(_in_call_order(messages), tools)
        thinks = is_on(variables or {}, default=False)
        last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
        roles = [*(message.role for message in messages), None]
        text = BOS
        for i, message in enumerate(messages):
            if message.role == "tool" and roles[i - 1] != "tool":
                text += "\n\n<function_results>"
            text += _write(message, thinks=thinks and i > last_user)
            if message.role == "tool":
                if roles[i + 1] == "tool":
                    continue
                text += "\n</function_results>"
            is_last = roles[i + 1] is None
            if is_last and not add_generation_prompt:
                break
            opens = BEGIN if thinks and i >= last_user else END
            if message.role == "tool":
                text += f"\n\n{opens}"
            elif message.role == "user" or is_last:
                text += ASSISTANT + opens
        return text


def _write(message: Message, thinks: bool) -> str:
    """thinks: an assistant's message has its thoughts."""
    content = text_of(message)
    if message.role == "user":
        return USER + content
    if message.role == "tool":
        return f"\n<result>{content}</result>"
    if message.role == "system":
        tools = _TOOLS.replace("SCHEMAS", write_schemas(message.tools)) if message.tools else ""
        return f"{content}\n\n{tools}" if tools else content
    thoughts = (message.reasoning_content or message.reasoning or "") + END if thinks else ""
    return thoughts + content + write_calls(message.tool_calls, _SECTION) + EOS


def _in_call_order(messages: list[Message]) -> list[Message]:
    """The results of each assistant's calls, by the calls' ids. ApiError where a result or a call has no counterpart:
    the prompt pairs them by their places."""
    ordered: list[Message] = []
    i = 0
    while i < len(messages):
        ordered.append(messages[i])
        i += 1
        results = []
        while i < len(messages) and messages[i].role == "tool":
            results.append(messages[i])
            i += 1
        if results:
            ordered += _paired(ordered[-1], results, first=i - len(results))
    return ordered


def _paired(caller: Message, results: list[Message], first: int) -> list[Message]:
    """first: the place of the first result among the messages."""
    ids = [call.id for call in caller.tool_calls or ()]
    if len(ids) != len(results):
        raise invalid(
            f"messages[{first}]",
            f"messages[{first}]: {len(results)} results follow a message with {len(ids)} tool calls; this model's "
            "prompt needs one result for each call",
        )
    answered = [result.tool_call_id for result in results]
    if None in ids or None in answered:  # clients without ids answer in order
        return results
    for i, call_id in enumerate(answered):
        if call_id not in ids or call_id in answered[:i]:
            where = f"messages[{first + i}].tool_call_id"
            why = "is answered twice" if call_id in ids else "is not among the calls before it"
            raise invalid(where, f"{where}={quoted(call_id)} {why}")
    return sorted(results, key=lambda result: ids.index(result.tool_call_id))
