"""The `eprt` command finds its programs, and each explains itself."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import eprt
from eprt import cli
from tests.paths import DEMO, DEMO_V4
from tests.unit.cases import ROOT


def test_the_usage_names_every_command(capsys):
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {word} ", out, re.MULTILINE) for word in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == eprt.__version__


def test_an_unknown_command_is_named(capsys):
    assert cli.main(["serv"]) == 2
    assert "no command 'serv'" in capsys.readouterr().err


def test_two_dashes_are_not_a_value(capsys):
    """argparse would hand an empty list to the program."""
    assert cli.main(["plan-cluster", "--model", "x", "--nodes=--"]) == 2
    assert capsys.readouterr().err == "eprt plan-cluster: --nodes=--: -- is not a value\n"


SUBCOMMANDS = [f"balance {word}" for word in ("plan", "replay", "compare", "show", "record")] + ["bench serve"]


@pytest.mark.parametrize("words", [*cli.COMMANDS, *SUBCOMMANDS])
def test_every_command_explains_itself(words, capsys):
    """Under the name it was called by, and with placeholders that say more than the flag once again."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*words.split(), "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: eprt {words} " in out
    assert not re.findall(r"--[a-z-]+ [A-Z]+_[A-Z_]+", out)


def test_flags_and_small_tools_do_not_load_torch():
    code = "import sys; from eprt import cli; cli.main({!r}); sys.exit('torch' in sys.modules)"
    for arguments in (
        ["balance", "plan", "--load", "x.npz", "--num-gpus", "1"],
        ["diagnose", "."],
        ["bench", "--list"],
        ["env", "--variables"],
    ):
        done = subprocess.run([sys.executable, "-c", code.format(arguments)], cwd=ROOT, check=False, timeout=300)
        assert done.returncode == 0, arguments


@pytest.mark.parametrize(
    ("library", "remedy"),
    [("msgspec", "`pip install msgspec`"), ("httpx", "`pip install httpx`"), ("torch", "`eprt env`")],
)
def test_a_missing_library_is_named_with_a_remedy(library, remedy, monkeypatch):
    """`eprt env` knows which torch and which MPI; the others are installed by their names."""

    def missing(module):
        raise ModuleNotFoundError(f"No module named {library!r}", name=library)

    monkeypatch.setattr(cli, "import_module", missing)
    with pytest.raises(SystemExit, match=f"eprt serve: {library} is not installed; {remedy}"):
        cli.main(["serve"])


@pytest.mark.parametrize("arguments", [["--url", "", "--text"], ["", "--json"]])
def test_an_address_that_is_empty_is_told(arguments, capfd):
    with pytest.raises(SystemExit) as caught:
        cli.main(["diagnose", *arguments])
    assert caught.value.code == 2 and "error: DIR or URL is empty" in capfd.readouterr().err


@pytest.mark.parametrize("words", [["env", "--variables"], ["balance", "show", "LOAD"], ["balance", "show", "--help"]])
def test_a_reader_that_has_seen_enough_is_no_error(words, tmp_path):
    """As after `| head`: nothing on standard error, and status 0."""
    (tmp_path / "load.json").write_text('{"load": [[1, 2], [3, 4]]}')
    words = [str(tmp_path / "load.json") if word == "LOAD" else word for word in words]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "eprt.cli", *words], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words",
    [
        ["eprt.generate", "--model", DEMO, "--prompt", "1", "--max-tokens", "1", "--kv-cache-gb", "0.02"],
        ["eprt.cluster", "--model", "benchmarks/shapes/deepseek_v3", "--nodes", "2"],
        ["eprt.hash_load", DEMO_V4, "README.md"],
    ],
)
def test_a_reader_that_has_seen_enough_is_no_error_of_a_module(words):
    """Programs can be started as `python -m`, too."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_interrupt_is_one_line(capsys, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=interrupted))
    assert cli.main(["convert", "a", "b"]) == 130
    assert capsys.readouterr() == ("", "eprt convert: interrupted\n")


def test_a_broken_pipe_to_anything_else_is_not_hidden(capfd, monkeypatch):
    def failed(arguments):
        raise BrokenPipeError

    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=failed))
    with pytest.raises(BrokenPipeError):
        cli.main(["serve"])
