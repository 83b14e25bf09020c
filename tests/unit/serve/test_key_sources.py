"""Keys from flags, files and variables."""

import pytest

from eprt.serve.flags import parse_options
from eprt.serve.key_sources import read_keys, tell_open_files
from eprt.serve.keys import ServerKeys
from eprt.serve.options import OptionError
from tests.unit.cases import MODEL


def keys(*flags: str) -> ServerKeys:
    return read_keys(parse_options(["--model", str(MODEL), *flags]))


def test_flags_and_files_and_variables(tmp_path, monkeypatch):
    for name in ("EPRT_API_KEY", "EPRT_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert keys() == ServerKeys()
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst\n\n  second  \n")
    assert keys("--api-key", "k", "--api-key-file", str(file)) == ServerKeys(("k", "first", "second"))
    assert keys("--admin-key-file", str(file)) == ServerKeys((), ("first", "second"))
    monkeypatch.setenv("EPRT_API_KEY", "of the variable")
    monkeypatch.setenv("EPRT_ADMIN_KEY", "root")
    assert keys() == ServerKeys(("of the variable",), ("root",))
    assert keys("--api-key", "k") == ServerKeys(("k",), ("root",))


@pytest.mark.parametrize(
    "content, why",
    [
        (None, "cannot be read: No such file or directory"),
        (b"# nothing else\n", "has no key; write one a line"),
        (b"\xff\n", "cannot be read: "),
        ("a\nschlüssel\n".encode(), "line 2: a key must be printable ASCII"),
    ],
)
def test_a_file_that_holds_no_key_is_named_and_its_lines_are_not_shown(tmp_path, content, why):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match=f"--api-key-file {file}: {why}") as caught:
        keys("--api-key-file", str(file))
    assert "schl" not in str(caught.value)


def test_a_file_that_every_user_can_read_is_told(tmp_path, capsys):
    files = [tmp_path / name for name in ("api", "admin")]
    for file, mode in zip(files, (0o644, 0o640)):
        file.write_text("k\n")
        file.chmod(mode)
    flags = ["--model", str(MODEL), "--api-key-file", str(files[0]), "--admin-key-file", str(files[1])]
    tell_open_files(parse_options(flags))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"eprt: --api-key-file {files[0]}: every user of this host can read it")
    files[0].chmod(0o600)
    tell_open_files(parse_options([*flags[:4]]))
    tell_open_files(parse_options(flags[:2]))
    assert capsys.readouterr().err == ""


TIERS = ("--tier", "max=1,0.03", "--tier", "base=2,0.07")


def test_a_line_may_give_its_key_a_tier(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst tier=max\nsecond\nwith spaces tier=base\n")
    found = keys("--api-key-file", str(file), *TIERS)
    assert found == ServerKeys(("first", "second", "with spaces"), (), {"first": "max", "with spaces": "base"})


@pytest.mark.parametrize(
    "lines, flags, why",
    [
        ("a\nsecret tier=gold\n", TIERS, "line 2: tier=gold: must be one of max, base"),
        ("secret tier=\n", TIERS, "line 1: tier=: must be one of max, base"),
        ("secret tier=max\n", (), "line 1: tier=max: there are no tiers; give --tier too"),
        ("secret tier=max\nsecret tier=base\n", TIERS, "line 2: this key has another tier in an earlier line"),
    ],
)
def test_a_tier_that_a_key_cannot_have_is_named_and_the_key_is_not(tmp_path, lines, flags, why):
    file = tmp_path / "keys"
    file.write_text(lines)
    with pytest.raises(OptionError, match=f"--api-key-file {file}: {why}") as caught:
        keys("--api-key-file", str(file), *flags)
    assert "secret" not in str(caught.value)
