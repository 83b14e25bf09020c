"""Tokenizer, incremental detokenizers and stop strings, against the tokenizers library and transformers."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from eprt.engine.detokenizer import WindowDetokenizer, new_detokenizer
from eprt.engine.sequence_text import StoppableText
from eprt.engine.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12 + 34 = 46",
    "Größe, naïve, 漢字かな, emoji 🎉🧪 and so on",
] * 8
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_ADDED_EOS = {"__type": "AddedToken", "content": EOS, "lstrip": False, "rstrip": False, "normalized": True}


def _save(tokenizer: HfTokenizer, folder, **config) -> Tokenizer:
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False), AddedToken("two words")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": _ADDED_EOS, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    """As DeepSeek's: byte-level BPE."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    return _save(tokenizer, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
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
    return _save(HfTokenizer.from_str(json.dumps(spec)), tmp_path_factory.mktemp("byte_fallback"))


def _incremental(detokenizer, ids: list[int]) -> str:
    return "".join(map(detokenizer.add_token, ids)) + detokenizer.finish()


@pytest.mark.parametrize("skip", [True, False])
def test_byte_detokenizer_equals_full_decode_on_any_ids(byte_level, skip):
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(byte_level.size) for _ in range(draw.randrange(60))]
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


def test_token_bytes(byte_level, byte_fallback):
    for text in ("fox 🎉", "two words", "<tool_call>"):
        assert b"".join(map(byte_level.token_bytes, byte_level.encode(text))) == text.encode()
    assert byte_fallback.token_bytes(byte_fallback._tokenizer.token_to_id("<0x0A>")) == b"\n"
    assert byte_level.token_bytes(10**6) == b""


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_ids_equal_transformers(byte_level, tmp_path, add_bos_token):
    from transformers import AutoTokenizer

    own = _save(HfTokenizer.from_str(byte_level._tokenizer.to_str()), tmp_path, add_bos_token=add_bos_token)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "The fox", f"{BOS}The 漢字 {EOS}<tool_call>", *CORPUS[:2]):
        assert own.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert own.decode(own.encode(text)) == theirs.decode(own.encode(text), skip_special_tokens=True)
    with_bos = own.encode("The fox")
    assert (with_bos[0] == own._tokenizer.token_to_id(BOS)) == add_bos_token
    assert own.encode(f"{BOS}The fox").count(own._tokenizer.token_to_id(BOS)) == 1
    assert own.special_tokens == {"bos_token": BOS, "eos_token": EOS}


def test_tokens_only_the_configuration_knows(byte_level, tmp_path):
    """Added with ids after the others, as transformers adds them, and special where they are declared so."""
    from transformers import AutoTokenizer

    size = byte_level.size
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    new = {
        str(size): {"content": "<think>", "special": False, **flags},
        str(size + 1): {"content": "<|call|>", "special": True, **flags},
    }
    tokenizer = HfTokenizer.from_str(byte_level._tokenizer.to_str())
    config = {"added_tokens_decoder": new, "additional_special_tokens": ["<|extra|>"], "pad_token": "ox"}
    own, theirs = _save(tokenizer, tmp_path, **config), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("The ox<think> <|call|>", "<|extra|>a<|call|><tool_call>", f"<|ext{BOS}|fox"):
        ids = own.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert own.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert own.size == len(theirs) == size + 4


def test_broken_directories_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


class _Letters:
    """A detokenizer whose token i is the i-th character of a text, so that stop strings meet every token boundary."""

    def __init__(self, text: str):
        self._text = text

    def add_token(self, token_id: int) -> str:
        return self._text[token_id]

    def finish(self) -> str:
        return ""


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=24), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), data=st.data()
)
def test_stop_strings_cut_at_the_first_completed_match_however_tokens_fall(text, stop, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    incremental, shown = StoppableText(_Letters(text), tuple(stop)), ""
    for begin, end in zip([0, *cuts], [*cuts, len(text)]):
        shown += incremental.add_tokens(list(range(begin, end)))
        assert not any(s in shown for s in stop)
    shown += incremental.finish()
    hits = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert shown == (text[: min(hits)[1]] if hits else text)
    assert incremental.stopped == bool(hits)


def test_only_a_possible_beginning_of_a_stop_string_is_held_back():
    incremental = StoppableText(_Letters("xEyEN!"), ("END",))
    assert [incremental.add_tokens([i]) for i in range(6)] == ["x", "", "Ey", "", "", "EN!"]
