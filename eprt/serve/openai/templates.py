"""Which template writes a checkpoint's prompts: a file's, the checkpoint's own, or the encoding of its model's type.

DeepSeek-V3.2 and V4 have no Jinja template: their checkpoints bring a Python program instead, which is not run.
Knows nothing of what templates write.
"""

import pkgutil
from pathlib import Path

from eprt.engine.tokenizer import Tokenizer
from eprt.models.config_file import ConfigFile
from eprt.serve.openai.chat import ChatTemplate
from eprt.serve.openai.prompt_template import PromptTemplate

# model_type of config.json -> the encoding of its checkpoints that have no Jinja template.
_ENCODINGS = {
    "deepseek_v32": "eprt.serve.openai.encodings.deepseek_v32:DeepSeekV32Encoding.from_checkpoint",
    "deepseek_v4": "eprt.serve.openai.encodings.deepseek_v4:DeepSeekV4Encoding.from_checkpoint",
}


def find_template(model_dir: str | Path, tokenizer: Tokenizer, file: str | None = None) -> PromptTemplate | None:
    """None where the checkpoint has none. file: a Jinja template to take instead. ValueError where it has an error."""
    if file is not None:
        return read_template_file(file, tokenizer.special_tokens)
    template = ChatTemplate.from_checkpoint(model_dir, tokenizer)
    return template or _encoding(Path(model_dir))


def read_template_file(file: str, special_tokens: dict[str, str]) -> ChatTemplate:
    """The Jinja template in this file. ValueError where there is none."""
    try:
        source = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not text in UTF-8: {error}") from None
    try:
        return ChatTemplate(source, special_tokens)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _encoding(model_dir: Path) -> PromptTemplate | None:
    path = model_dir / "config.json"
    model_type = ConfigFile(path).take("model_type", str, "") if path.is_file() else ""
    if model_type not in _ENCODINGS:
        return None
    return pkgutil.resolve_name(_ENCODINGS[model_type])(model_dir)
