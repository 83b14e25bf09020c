"""What a server would take is told without starting one."""

import re
from types import SimpleNamespace

import torch

from eprt import machine
from eprt.serve import __main__ as program
from tests.unit.cases import MODEL


def test_it_tells_the_memory_and_whether_it_fits(capsys):
    assert program.main(["--model", str(MODEL), "-n", "2", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("checkpoint, memory of each of 2 ranks on this host:\n") and told.endswith("it fits\n")
    assert re.search(r"^KV cache +0\.\d+ GB   524288 tokens, 768 bytes each, longest context 2048 tokens$", told, re.M)


def test_what_does_not_fit_is_status_1(capsys, monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 300 << 20)
    assert program.main(["--model", str(MODEL), "--dry-run", "--kv-cache-gb", "0.3"]) == 1
    assert capsys.readouterr().out.endswith("it does not fit\n")


def test_without_a_gpu_nothing_is_promised_of_one(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main(["--model", str(MODEL), "--dry-run", "--device", "cuda"]) == 1
    told = capsys.readouterr().out
    assert "the GPU's memory                   unknown" in told and "KV cache   " in told
    assert "what --memory-fraction leaves: 524288 tokens in 0.38 GB" in told
    assert told.endswith("whether it fits is not known: there is no GPU here\n")


def test_the_ranks_of_a_gpu_share_it(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8 << 30))
    assert program.main(["--model", str(MODEL), "--dry-run", "--device", "cuda", "-n", "4"]) == 0
    told = capsys.readouterr().out
    assert "each of 4 ranks on a GPU" in told and "the GPU's memory                   4.00 GB\nit fits\n" in told


def test_what_cannot_be_served_is_status_2(capsys, monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 100 << 20)
    assert program.main(["--model", str(MODEL), "--dry-run"]) == 2
    assert "no memory is left for a KV cache: weights and buffers take " in capsys.readouterr().err


def test_instances_are_told_by_role_and_share_the_host(capsys):
    flags = ["--prefill", "1", "--decode", "2", "--prefill-ranks", "2", "--skip-tokenizer-init", "--dry-run"]
    assert program.main(["--model", str(MODEL), *flags]) == 0
    said = capsys.readouterr().out
    assert "prefill instances, memory of each of 2 ranks" in said and "decode instances, memory of 1 rank" in said
