"""Build the demo model's tokenizer: byte-level BPE in which every digit is a token of its own.

    python -m examples.demo_model.tokenizer OUT_DIR

Any UTF-8 text round-trips, because all 256 bytes are in the vocabulary.
"""

import json
import random
import re
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from . import chat, dataset

VOCAB_SIZE = 640
SPECIAL_TOKENS = (chat.BOS, chat.EOS, chat.PAD, chat.USER, chat.ASSISTANT, chat.TOOL)
"""Their ids are 0, 1, 2, ...; `chat.MARKS` follow."""

TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")


def build_tokenizer(num_documents: int = 20000) -> Tokenizer:
    """Train the merges on generated documents (deterministic)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS, *chat.MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random("tokenizer")
    marks = re.compile("|".join(map(re.escape, (*SPECIAL_TOKENS, *chat.MARKS))))
    texts = (
        piece for _ in range(num_documents) for text, _ in dataset.document(rng) for piece in marks.split(text) if piece
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[chat.BOS, "$A"], pair=[chat.BOS, "$A", "$B"], special_tokens=[(chat.BOS, 0)]
    )
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] not in chat.MARKS
    return Tokenizer.from_str(json.dumps(state))


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = TEMPLATE_PATH.read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": chat.BOS,
        "eos_token": chat.EOS,
        "pad_token": chat.PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    save_tokenizer(build_tokenizer(), Path(sys.argv[1]))
