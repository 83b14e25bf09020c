"""Tokenizer: ids and text as in the tokenizers library and in transformers; what a long text costs."""

import json
import threading
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from eprt.engine.tokenizer import Tokenizer
from tests.paths import DEMO
from tests.unit.engine.tokenizer_cases import (
    BOS,
    CORPUS,
    EOS,
    save_tokenizer,
    save_with_config,
    train_byte_level,
)

TEXTS = ["the quick brown fox"] * 4


def test_token_bytes(byte_level, byte_fallback):
    for text in ("fox 🎉", "two words", "<tool_call>"):
        assert b"".join(map(byte_level.token_bytes, byte_level.encode(text))) == text.encode()
    assert byte_fallback.token_bytes(byte_fallback._tokenizer.token_to_id("<0x0A>")) == b"\n"
    assert byte_level.token_bytes(10**6) == b""


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_ids_equal_transformers(byte_level, tmp_path, add_bos_token):
    from transformers import AutoTokenizer

    own = save_with_config(HfTokenizer.from_str(byte_level._tokenizer.to_str()), tmp_path, add_bos_token=add_bos_token)
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

    size = byte_level._tokenizer.get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    new = {
        str(size): {"content": "<think>", "special": False, **flags},
        str(size + 1): {"content": "<|call|>", "special": True, **flags},
    }
    tokenizer = HfTokenizer.from_str(byte_level._tokenizer.to_str())
    config = {"added_tokens_decoder": new, "additional_special_tokens": ["<|extra|>"], "pad_token": "ox"}
    own, theirs = save_with_config(tokenizer, tmp_path, **config), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("The ox<think> <|call|>", "<|extra|>a<|call|><tool_call>", f"<|ext{BOS}|fox"):
        ids = own.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert own.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert own._tokenizer.get_vocab_size() == len(theirs) == size + 4


def test_broken_directories_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def changed(directory, name: str, change) -> None:
    """A copy of the demo model's tokenizer in which one file is changed."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        content = json.loads((Path(DEMO) / file).read_text())
        if file == name:
            change(content)
        (directory / file).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tokenizer.json", lambda c: c["model"]["vocab"].update({"#": 1 << 31}), "token id 2147483648: must be below"),
        ("tokenizer.json", lambda c: c["added_tokens"][0].update(id=10**30), r"token id 10+: must be below"),
        ("tokenizer.json", lambda c: c.update(model=3), "model=3 has the wrong type"),
        ("tokenizer.json", lambda c: c.update(pre_tokenizer="x" * 10_000), r"tokenizer\.json"),
        ("tokenizer.json", lambda c: c["model"].update(continuing_subword_prefix="x" * 30), "range end"),  # a panic
        ("tokenizer_config.json", lambda c: c.update(added_tokens_decoder=1e308), "not written as transformers does"),
        ("tokenizer_config.json", lambda c: c.update(added_tokens_decoder={"1": [1]}), "not written as"),
        ("tokenizer_config.json", lambda c: c.update(added_tokens_decoder={"x": {}}), "not written as"),
        ("tokenizer_config.json", lambda c: c.update(extra_special_tokens=[[1]]), "not written as"),
    ],
)
def test_wrong_fields_are_refused_in_a_short_line(name, change, words, tmp_path):
    changed(tmp_path, name, change)
    with pytest.raises(ValueError, match=words) as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_no_text_has_fewer_tokens_than_its_length_says(tmp_path):
    tokenizer = save_tokenizer(train_byte_level(TEXTS, 300), tmp_path)
    assert tokenizer.longest_token is not None
    for text in ("the quick brown fox", "quick" * 50, "漢字🎉" * 20, " \n\t" * 30):
        assert len(tokenizer.encode(text)) * tokenizer.longest_token >= len(text.encode())


@pytest.mark.parametrize("swallower", ["lstrip", "normalizer", "whitespace", "removed"])
def test_a_tokenizer_that_swallows_text_has_no_longest_token(tmp_path, swallower):
    tokenizer = train_byte_level(TEXTS, 300)
    if swallower == "lstrip":
        tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    elif swallower == "normalizer":
        tokenizer.normalizer = normalizers.Strip()
    else:
        pieces = {
            "whitespace": pre_tokenizers.Whitespace(),
            "removed": pre_tokenizers.Split(" ", behavior="removed"),
        }
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces[swallower], pre_tokenizers.ByteLevel()])
    assert save_tokenizer(tokenizer, tmp_path).longest_token is None


def test_truncation_and_padding_left_in_the_file_are_not_heeded(tmp_path):
    plain = train_byte_level(TEXTS, 300)
    text = "the quick brown fox " * 10
    wanted = plain.encode(text).ids
    plain.enable_truncation(max_length=4)
    plain.enable_padding(length=500)
    assert save_tokenizer(plain, tmp_path).encode(text) == wanted


def test_a_long_text_is_tokenised_while_others_run(tmp_path):
    tokenizer = save_tokenizer(train_byte_level(TEXTS, 300), tmp_path)
    text = "the quick brown fox " * 50_000
    ids: list[int] = []
    thread = threading.Thread(target=lambda: ids.extend(tokenizer.encode(text)))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 10  # a call that held the interpreter would leave one or two
    assert tokenizer.decode(ids) == text
