"""The operator's command that starts an instance, as it is written."""

import pytest

from eprt.serve.flags import parse_options
from eprt.serve.options import OptionError
from eprt.serve.start_command import command_words
from tests.unit.cases import MODEL


def given(command: str, *flags: str) -> str | None:
    flags = flags or ("--prefill", "1", "--decode", "1")
    return parse_options(["--model", str(MODEL), *flags, "--start-instance-command", command]).start_instance_command


def test_it_is_split_as_a_shell_would():
    assert given("systemctl start eprt@{role}") == "systemctl start eprt@{role}"
    words = command_words("run 'a b' {role} n={ranks} {url}", role="prefill", ranks=2, url="u")
    assert words == ["run", "a b", "prefill", "n=2", "u"]


@pytest.mark.parametrize(
    "command, words",
    [
        ("", "'': is empty; give a command"),
        ("start 'x", "start 'x: cannot be read (No closing quotation)"),
        ("start {role", "start {role: cannot be read"),
        ("start {kind}", "start {kind}: {kind} is unknown; there are {role}, {ranks}, {url}"),
        ("start eprt", "start eprt: has no {role}"),
    ],
)
def test_what_cannot_be_run_is_named(command, words):
    with pytest.raises(OptionError) as caught:
        given(command)
    assert str(caught.value).startswith(f"--start-instance-command {words}")


def test_it_is_of_instances():
    with pytest.raises(OptionError, match=r"--start-instance-command x \{role\}: is of instances"):
        given("x {role}", "-n", "1")
