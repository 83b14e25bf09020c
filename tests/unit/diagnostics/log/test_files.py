"""One file of a log: plain or packed, its lines have places by which they are read again."""

import gzip
from pathlib import Path

import pytest
from eprt.diagnostics.log.files import LogFile, first_bytes


def file_of(path: Path, lines: list[bytes]) -> LogFile:
    content = b"".join(lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    file = LogFile(path, 0, path.stat().st_ino, first_bytes(path))
    for line, length in file.new_lines():
        file.offsets.append(file.end + length)
        file.windows.append(int(line))
        file.parts.append(0)
    return file


@pytest.mark.parametrize("name", ["diagnose_rank0.log", "diagnose_rank0.log.gz"])
def test_lines_are_read_again_by_their_number(tmp_path, name):
    file = file_of(tmp_path / name, [b"3\n", b"44\n", b"5\n"])
    assert file.num_lines == 3 and file.find_lines(4, 50) == [1, 2]
    assert list(file.read_lines([2, 0])) == [(2, b"5\n"), (0, b"3\n")]


def test_an_unfinished_line_is_cut_off_and_counted(tmp_path):
    file = file_of(tmp_path / "diagnose_rank0.log", [b"3\n", b"44\n"])
    with file.path.open("ab") as stream:
        stream.write(b"55")
    assert list(file.new_lines()) == [] and file.num_cut_off == 2


def test_a_file_that_is_not_packed_though_it_says_so(tmp_path):
    path = tmp_path / "diagnose_rank0.log.gz"
    path.write_bytes(b"3\n")
    file = LogFile(path, 0, path.stat().st_ino, first_bytes(path))
    assert list(file.new_lines()) == [] and "cannot be unpacked further" in file.problem


def test_a_file_that_was_replaced_is_no_longer_there(tmp_path):
    file = file_of(tmp_path / "diagnose_rank0.log", [b"3\n"])
    file.path.rename(tmp_path / "diagnose_rank0.log.1")
    (tmp_path / "diagnose_rank0.log").write_bytes(b"4\n")
    with pytest.raises(FileNotFoundError, match="was rotated away"):
        list(file.read_lines([0]))
