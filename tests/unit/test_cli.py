"""The `eprt` command finds its programs, each explains itself, and generate answers the same on one rank and on two."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import eprt
from eprt import cli, env
from eprt.mpirun import mpirun_command
from eprt.serve import errors

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "demo_model" / "checkpoint"


def run(*arguments: str, launcher: Sequence[str] = ()) -> subprocess.CompletedProcess:
    command = [*launcher, sys.executable, "-m", "eprt.cli", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=env.mpi_environment(), capture_output=True, text=True, timeout=120, check=False
    )


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
    for arguments in (["balance", "plan", "--load", "x.npz", "--num-gpus", "1"], ["diagnose", "."], ["bench", "--list"],
                      ["env", "--variables"]):  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code.format(arguments)], cwd=ROOT, check=False, timeout=60)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere", "--prompt", "x"], "nowhere"),
        (["--model", str(MODEL)], "no prompt"),
        (["--model", str(MODEL), "--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["--model", str(MODEL), "--prompt", "x", "--dtype", "float8"], "--dtype float8"),
        (["--model", str(MODEL), "--prompt", "x", "--overlap", "dbo"], "--overlap dbo"),
        (["--model", str(MODEL), "--prompt", "x", "--num-speculative-tokens", "17"], "--num-speculative-tokens 17"),
        (["--model", str(MODEL), "--file", "missing.txt"], "missing.txt"),
    ],
)
def test_generate_refuses_in_one_line(arguments, message, capsys):
    assert cli.main(["generate", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("eprt generate: ") and message in err and err.count("\n") == 1


def test_generate_reads_no_mistyped_variable_over(monkeypatch, capsys):
    monkeypatch.setenv("EPRT_GPU_ATENTION", "triton")
    assert cli.main(["generate", "--model", str(MODEL), "--prompt", "x"]) == 2
    assert "unknown environment variable EPRT_GPU_ATENTION" in capsys.readouterr().err


def test_generate_answers_alike_on_one_rank_and_on_two(tmp_path):
    (tmp_path / "prompts.txt").write_text("What is 12 + 30?\nSort: pear, fig, apple\nSpell castle backwards.\n")
    arguments = ("generate", "--model", str(MODEL), "--chat", "--file", str(tmp_path / "prompts.txt"), "--json")
    drafts = ("--num-speculative-tokens", "2", "--overlap", "tbo", "--kv-cache-gb", "0.02")
    one, two = run(*arguments), run(*arguments, *drafts, launcher=mpirun_command("-n", "2"))
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    answers = [json.loads(line) for line in one.stdout.splitlines()]
    assert answers == [json.loads(line) for line in two.stdout.splitlines()]
    assert len(answers) == 3 and answers[0]["prompt"] == "What is 12 + 30?"
    assert answers[0]["text"].endswith("42") and answers[0]["finish_reason"] == "stop"


def test_bytes_that_are_no_text_are_told(capfd):
    assert cli.main(["generate", "--model", str(MODEL), "--prompt", "caf\udce9", "--max-tokens", "1"]) == 2
    assert capfd.readouterr().err == (
        "eprt generate: prompt 0: 'caf\\udce9' has half of a surrogate pair, which is no character; is it UTF-8?\n"
    )


def test_one_rank_tells_what_all_find(capfd, monkeypatch):
    monkeypatch.setattr(errors, "RANK_0_SPEAKS_FIRST_S", 0.0)
    for rank, told in ((None, "eprt x: no"), (0, "eprt x: no"), (2, f"eprt x: rank 2 on {socket.gethostname()}: no")):
        errors.tell_mistake("eprt x", ValueError("no"), rank)
        assert capfd.readouterr().err == told + "\n"


@pytest.mark.parametrize("arguments", [["--url", "", "--text"], ["", "--json"]])
def test_an_address_that_is_empty_is_told(arguments, capfd):
    with pytest.raises(SystemExit) as caught:
        cli.main(["diagnose", *arguments])
    assert caught.value.code == 2 and "error: DIR or URL is empty" in capfd.readouterr().err
