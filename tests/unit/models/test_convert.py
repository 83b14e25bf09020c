"""eprt convert: the same tensors bit for bit, in files that each rank reads from front to end."""

import json
import resource
import signal

import pytest
import torch

from eprt import EngineConfig, EPGroup
from eprt.cli import main
from eprt.ep.placement.slot_map import SlotMap
from eprt.models.checkpoint import INDEX_NAME, Checkpoint
from eprt.models.convert import convert
from eprt.models.loader import load_model
from tests import tiny
from tests.paged import PagedRunner

NUM_RANKS = 3


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tiny.save(tiny.make_variant("v3"), tmp_path_factory.mktemp("source"))
    tiny.quantize_checkpoint(directory)
    (directory / "assets").mkdir()
    (directory / "notes.txt").write_text("kept")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    return directory


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("out") / "converted"
    result = convert(source, target, NUM_RANKS, max_file_bytes=100_000)
    assert result.not_copied == ("assets",) and result.num_files == len(list(target.glob("*.safetensors")))
    return target


def tensors_of(directory):
    checkpoint = Checkpoint(directory)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def test_a_link_to_nothing_is_refused_before_anything_is_read(source, tmp_path, capsys):
    """Nothing could be renamed to it: the directory behind it does not exist."""
    target = tmp_path / "link"
    target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"link is a symbolic link to nothing; name a directory that does not exist"):
        convert(source, target, NUM_RANKS, progress=lambda done, total: pytest.fail("it copies"))
    assert main(["convert", str(source), str(target), "--num-ranks", "3"]) == 2
    assert "is a symbolic link to nothing" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["link"] and target.is_symlink()


def test_tensors_are_the_same_bits(source, converted):
    before, after = tensors_of(source), tensors_of(converted)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    assert (converted / "notes.txt").read_text() == "kept"
    assert (converted / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"


def test_a_rank_reads_the_dense_files_and_its_own(converted):
    checkpoint = Checkpoint(converted)
    num_experts = json.loads((converted / "config.json").read_text())["n_routed_experts"]
    slots = SlotMap.contiguous(num_experts, NUM_RANKS)
    for rank in range(NUM_RANKS):
        for expert in set(slots.experts_of_rank(rank, NUM_RANKS)) - {-1}:
            files = {info.file.name for name, info in checkpoint.tensors.items() if f".experts.{expert}." in name}
            assert files and all(name.startswith(f"rank-{rank:03d}-") for name in files)
    dense = {info.file.name for name, info in checkpoint.tensors.items() if ".mlp.experts." not in name}
    assert all(name.startswith("dense-") for name in dense)


def test_files_keep_their_bound(converted):
    checkpoint = Checkpoint(converted)
    for path in converted.glob("*.safetensors"):
        sizes = [info.num_bytes for info in checkpoint.tensors.values() if info.file == path]
        assert sum(sizes) <= 100_000 or len(sizes) == 1
    assert len(list(converted.glob("dense-*"))) > 1


def test_the_model_is_the_same(source, converted):
    tokens = tiny.prompts()[2]
    one, other = (
        PagedRunner(load_model(EngineConfig(str(directory)), EPGroup.single())) for directory in (source, converted)
    )
    assert torch.equal(one.prefill(one.request(tokens)), other.prefill(other.request(tokens)))


def test_an_interrupted_conversion_leaves_no_target(source, tmp_path, monkeypatch, capsys):
    target = tmp_path / "target"

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("eprt.models.convert.save_file", full)
        assert main(["convert", str(source), str(target), "--num-ranks", "2"]) == 2
    assert "No space left" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    (tmp_path / "target.partial").mkdir()  # of one that was killed
    assert main(["convert", str(source), str(target), "--num-ranks", "2"]) == 0
    assert "GB/s" in capsys.readouterr().out and (target / INDEX_NAME).exists()


def test_a_disk_that_is_full_is_named(source, tmp_path, capsys):
    """Full for the library that writes: its error is no OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        assert main(["convert", str(source), str(tmp_path / "target"), "--num-ranks", "2"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    message = capsys.readouterr().err
    assert "dense-00000.safetensors: cannot be written" in message and "File too large" in message
    assert list(tmp_path.iterdir()) == [], "what was written must not stay on a disk that is full"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-ranks", "0"], "--num-ranks 0: must be in 1..16"),
        (["--num-ranks", "17"], "--num-ranks 17: must be in 1..16"),
        (["--num-ranks", "2", "--max-file-gb", "nan"], "--max-file-gb nan"),
        (["--num-ranks", "2", "--max-file-gb", "inf"], "--max-file-gb inf"),
    ],
)
def test_refusals(source, tmp_path, capsys, options, message):
    assert main(["convert", str(source), str(tmp_path / "target"), *options]) == 2
    assert message in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path), "--num-ranks", "2"]) == 2
    assert f"{tmp_path} exists" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "target"), "--num-ranks", "2"]) == 2
    assert "no such directory" in capsys.readouterr().err
