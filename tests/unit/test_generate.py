"""`eprt generate`: the same answers on one rank and on two, and one line for what is wrong."""

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from eprt import cli, env
from eprt.mpirun import mpirun_command
from tests.unit.cases import MODEL, ROOT


def run(*arguments: str, launcher: Sequence[str] = ()) -> subprocess.CompletedProcess:
    command = [*launcher, sys.executable, "-m", "eprt.cli", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=env.mpi_environment(), capture_output=True, text=True, timeout=300, check=False
    )


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


def test_a_file_that_cannot_be_read_is_told(tmp_path, capfd):
    assert cli.main(["generate", "--model", str(MODEL), "--file", str(tmp_path)]) == 2
    assert capfd.readouterr().err == f"eprt generate: --file {tmp_path}: cannot be read: Is a directory\n"


def test_bytes_that_are_no_text_are_told(capfd):
    assert cli.main(["generate", "--model", str(MODEL), "--prompt", "caf\udce9", "--max-tokens", "1"]) == 2
    assert capfd.readouterr().err == (
        "eprt generate: prompt 0: 'caf\\udce9' has half of a surrogate pair, which is not a character; is it UTF-8?\n"
    )
