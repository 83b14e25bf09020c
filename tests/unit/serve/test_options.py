"""Options of a server, and those that all its ranks must share."""

import pytest

from eprt.serve.flags import parse_options
from eprt.serve.options import OptionError, common_flags, make_diagnose_dir
from tests.unit.cases import MODEL


def options(*arguments: str):
    return parse_options(["--model", str(MODEL), *arguments])


def test_hosts_may_keep_the_model_elsewhere(tmp_path):
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    elsewhere = parse_options(["--model", str(tmp_path), "--bind", "none"])
    assert common_flags(elsewhere) == common_flags(options())


def test_common_flags_are_named_as_they_are_given():
    given = common_flags(options("--no-prefix-cache", "--diagnose-log-mb", "2", "-n", "3", "--drain-timeout", "7"))
    assert given["--no-prefix-cache"] is True and given["--diagnose-log-mb"] == 2.0
    assert given["-n"] == 3 and given["--drain-timeout"] == 7.0
    assert common_flags(options())["--no-prefix-cache"] is False


def test_a_log_directory_is_made_where_it_can_be(tmp_path):
    make_diagnose_dir(options())
    make_diagnose_dir(options("--diagnose-dir", str(tmp_path / "a" / "b")))
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").touch()
    for path, why in ((tmp_path / "file" / "x", "Not a directory"), ("\0", "embedded null byte")):
        with pytest.raises(OptionError, match=f"--diagnose-dir .*: the log cannot be written there: {why}"):
            make_diagnose_dir(options("--diagnose-dir", str(path)))
