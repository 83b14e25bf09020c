"""Which formats of tool calls and of reasoning a checkpoint's model writes, by flag or by the checkpoint's own words.

Knows nothing of how the formats are read (tools.py, reasoning.py).
"""

from dataclasses import dataclass

from eprt.engine.tokenizer import Tokenizer
from eprt.serve.openai.prompt_template import PromptTemplate
from eprt.serve.openai.reasoning import BEGIN, ReasoningFormat, reasoning_format_named
from eprt.serve.openai.thinking import probe
from eprt.serve.openai.tools import ToolFormat, tool_format_named

_DSML = "｜DSML｜"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"


@dataclass(frozen=True)
class ModelFormats:
    """How one model writes what is not plain text."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @staticmethod
    def from_checkpoint(
        tokenizer: Tokenizer, template: PromptTemplate | None, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> "ModelFormats":
        """tool_parser, reasoning_parser: a name, none, or auto: what the chat template says or shows."""
        sources = "\n".join(template.sources) if template else ""
        if tool_parser == "auto":
            tool_parser = (template and template.tool_format) or _tool_format(tokenizer, sources)
        if reasoning_parser == "auto":
            reasoning_parser = (template and template.reasoning_format) or _reasoning_format(template, sources)
        return ModelFormats(
            tool_format_named(tool_parser) if tool_parser != "none" else None,
            reasoning_format_named(reasoning_parser) if reasoning_parser != "none" else None,
        )

    def has_special_marks(self, tokenizer: Tokenizer) -> bool:
        """Whether a mark contains a special token, which text otherwise leaves out."""
        marks = (*(self.tools.marks if self.tools else ()), *(self.reasoning.marks if self.reasoning else ()))
        return any(token in mark for token in tokenizer.special_texts for mark in marks)


def _tool_format(tokenizer: Tokenizer, sources: str) -> str:
    if _DSML in sources:
        return "deepseek_v4" if f"<{_DSML}tool_calls>" in sources else "deepseek_v32"
    if _DEEPSEEK_CALL in sources:
        return "deepseek_v3" if "```json" in sources else "deepseek_v31"
    if "<tool_call>" in sources:
        return "hermes"
    # A template that prints no calls: the marks that the tokenizer has.
    if tokenizer.has_token(_DSML):
        return "deepseek_v32"
    return "deepseek_v3" if tokenizer.has_token(_DEEPSEEK_CALL) else "hermes"


def _reasoning_format(template: PromptTemplate | None, sources: str) -> str:
    """Certain where a prompt can end with an open <think>."""
    if template is None:
        return "none"
    switches = {"thinking", "enable_thinking"} & template.variables
    if not any(probe(template, variables).endswith(BEGIN) for variables in ({}, dict.fromkeys(switches, True))):
        return "none"
    if _DSML in sources:
        return "deepseek_v4"
    return "deepseek_v3" if switches else "deepseek_r1"
