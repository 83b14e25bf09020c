"""eprt hash-load: expert load of hash layers from text equals what a server counts of the same tokens."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from eprt.balancer import read_load
from safetensors.torch import load_file

from eprt import LLM, SamplingParams
from eprt.engine.tokenizer import Tokenizer
from eprt.hash_load import main
from tests import paths

DEMO, DEMO_V4 = Path(paths.DEMO), Path(paths.DEMO_V4)

TEXT = "What is 23 + 45? The capital of Zorland is Mirra. Sort: pear, fig, apple. " * 3


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return path


def test_the_load_is_that_of_the_table_and_a_plan_reads_it(tmp_path, corpus, capsys):
    out = tmp_path / "load.json"
    assert main([str(DEMO_V4), str(corpus), "--out", str(out), "--drafts"]) == 0
    ids = Tokenizer(DEMO_V4).encode(TEXT)
    assert f"{len(ids)} tokens, most loaded expert" in capsys.readouterr().out
    load = read_load(out).total(None)
    table = load_file(DEMO_V4 / "model.safetensors")["layers.0.ffn.gate.tid2eid"]
    want = torch.bincount(table[ids].flatten(), minlength=32)
    assert load.shape == (5, 32) and load[0].tolist() == want.tolist()
    assert np.allclose(load[1:], len(ids) * 4 / 32)


def test_an_engine_counts_the_same(corpus, capsys):
    assert main([str(DEMO_V4), str(corpus)]) == 0
    load = json.loads(capsys.readouterr().out)["load"]
    with LLM(str(DEMO_V4), kv_cache_gb=0.02) as llm:
        llm.generate([TEXT], SamplingParams(max_tokens=1))
        counted = llm.engine.recorder.tokens_PLE.sum(axis=0)
    assert counted[0].tolist() == load[0]


def test_what_does_not_fit_is_refused(tmp_path, corpus, capsys):
    def refusal(*argv) -> str:
        assert main([str(each) for each in argv]) == 2
        return capsys.readouterr().err

    assert "no num_hash_layers" in refusal(DEMO, corpus)
    assert "no such file" in refusal(tmp_path, corpus).lower()
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\x00")
    assert "empty.txt: no tokens" in refusal(DEMO_V4, empty)
    assert "binary: not UTF-8" in refusal(DEMO_V4, binary)
    assert f"{tmp_path}: cannot be read: Is a directory" in refusal(DEMO_V4, tmp_path)
    other = tmp_path / "other"
    shutil.copytree(DEMO_V4, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    assert "but the model has 20" in refusal(other, corpus)
