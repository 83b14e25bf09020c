"""`eprt balance`: subcommands and exit status."""

import pytest
from eprt.balancer.__main__ import build_parser, main


def test_every_subcommand_has_its_help(capsys):
    for command in ("plan", "replay", "compare", "show", "record"):
        with pytest.raises(SystemExit) as exit_:
            build_parser().parse_args([command, "--help"])
        assert exit_.value.code == 0 and f"eprt balance {command}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2 and "command" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), OSError("gone"), ImportError("missing"), MemoryError("2 EiB"), RecursionError("too deep")],
)
def test_what_cannot_be_used_is_one_line_and_status_2(error, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr("eprt.balancer.commands.show.run", fail)
    assert main(["show", "a.npz"]) == 2
    assert capsys.readouterr().err == f"eprt balance: {error}\n"
