"""Small tokenizers of both kinds, trained here, as checkpoints have them."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from eprt.engine.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12 + 34 = 46",
    "Größe, naïve, 漢字かな, emoji 🎉🧪 and so on",
] * 8
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_ADDED_EOS = {"__type": "AddedToken", "content": EOS, "lstrip": False, "rstrip": False, "normalized": True}


def train_byte_level(corpus: Sequence[str] = CORPUS, vocab_size: int = 320) -> HfTokenizer:
    """As DeepSeek's: byte-level BPE."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet))
    return tokenizer


def train_byte_fallback() -> HfTokenizer:
    """As Llama's and Mixtral's: words begin with a mark, unknown characters fall back to byte tokens."""
    tokenizer = HfTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *byte_tokens])
    tokenizer.train_from_iterator([CORPUS[0]], trainer)
    # Byte tokens are ordinary vocabulary, not special.
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    return HfTokenizer.from_str(json.dumps(spec))


def save_tokenizer(tokenizer: HfTokenizer, folder: Path) -> Tokenizer:
    """tokenizer.json alone."""
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def save_with_config(tokenizer: HfTokenizer, folder: Path, **config) -> Tokenizer:
    """With BOS, EOS, two added tokens, and a tokenizer_config.json."""
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False), AddedToken("two words")])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": _ADDED_EOS, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return save_tokenizer(tokenizer, folder)
