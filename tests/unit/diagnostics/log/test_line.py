"""A line that is decoded into the types of its fields is the same record, or the same refusal, as the long way."""

import json

import numpy as np
import pytest
from eprt.diagnostics import ExpertRows, WindowRecord, read_log
from eprt.diagnostics.log import line as line_module
from eprt.diagnostics.log.line import read_line
from eprt.diagnostics.log.standing import LoggedProcess, Standing
from eprt.diagnostics.log.typed_line import decode_line

from tests.unit.diagnostics.cases import add_line, record, synthetic_records, write_records

FULL = record(
    rank=2,
    dispatch_wait_us=[0, 1.5, 1e18, 7e-12],
    blocked_us=7,
    usage={"cpu_us": 5.0, "num_throttled": 3},
    experts=ExpertRows(2, (1, 3), ((0, 1), (-1, 1)), ((5, 1), (0, 7))),
    process=LoggedProcess("host7", 4711, "NVIDIA H200, GPU 2"),
    standing=Standing(27.5, 2, "dispatch", 26.9, "steps"),
)
LINE = record().to_line()


def outcome(read, line: bytes) -> WindowRecord | str:
    try:
        return read(line)
    except ValueError as error:
        return str(error)


def long_way(line: bytes) -> WindowRecord:
    return WindowRecord.from_line(line.decode())


@pytest.mark.parametrize("one", [FULL, record(), record(num_calls=0), *synthetic_records(3, 2)])
def test_what_is_written_is_read_the_short_way_and_each_number_keeps_its_type(one):
    line = one.to_line().encode()
    assert decode_line(line) == one
    assert read_line(line) == one and repr(read_line(line)) == repr(long_way(line))


@pytest.mark.parametrize(
    "line",
    [
        LINE.replace("[6000.0,", "[NaN,"),
        LINE.replace("[6000.0,", "[Infinity,"),
        LINE.replace("[6000.0,", "[1e999,"),
        LINE.replace("[6000.0,", "[-1,"),
        LINE.replace("[6000.0,", "[true,"),
        LINE.replace("[6000.0,", '["6000",'),
        LINE.replace("[6000.0,", "[1000000000000000001,"),
        LINE.replace("[6000.0,", f"[{10**40},"),
        LINE.replace("[3200,", "[3200.5,"),
        LINE.replace("[3200,", "["),
        LINE.replace('"node_of_rank":[0,0,0,0]', '"node_of_rank":[0,0,1]'),
        LINE.replace('"node_of_rank":[0,0,0,0]', '"node_of_rank":{}'),
        LINE.replace('"node_of_rank":[0,0,0,0]', '"node_of_rank":[0,0,-1,0]'),
        LINE.replace('"window":0', '"window":0.0'),
        LINE.replace('"window":0', '"window":-1'),
        LINE.replace('"rank":0', '"rank":4'),
        LINE.replace('"num_ranks":4', '"num_ranks":0'),
        LINE.replace('"num_ranks":4', '"num_ranks":5000'),
        LINE.replace('"t_end":1010.0', '"t_end":1.0'),
        LINE.replace('"t_end":1010.0', '"t_end":1010'),
        LINE.replace('"t_end":1010.0', '"t_end":1e300'),
        LINE.replace('"compute_us":20000.0', '"compute_us":null'),
        LINE.replace('"schema":"eprt.diagnose/1"', '"schema":"eprt.diagnose/2"'),
        LINE.replace('"schema":"eprt.diagnose/1"', '"schema":7'),
        LINE.replace('"schema":"eprt.diagnose/1",', ""),
        LINE.replace("}", ',"window":7}'),
        LINE.replace("}", ',"blocked_us":-1}'),
        LINE.replace("}", ',"blocked_us":null}'),
        LINE.replace("}", ',"usage":7}'),
        LINE.replace("}", ',"usage":{"cpu_us":-1}}'),
        LINE.replace("}", ',"experts":[1]}'),
        LINE.replace("}", ',"process":{"host":"a"}}'),
        LINE.replace("}", ',"standing":[]}'),
        LINE.replace("}", ',"later":{"a":[1,2,{"b":null}]}}'),
        LINE.replace("}", ',"later":"\N{SNOWMAN}"}'),
        LINE.replace("}", f',"later":{"[" * 100_000}}}'),
        LINE.replace(",", " ,\t ").replace(":", " : "),
        json.dumps(dict(reversed(json.loads(LINE).items()))),
        f"  {LINE}",
        LINE[:-20],
        "[1]",
        "7",
        "",
    ],
)
def test_odd_lines_mean_the_same_either_way(line):
    assert outcome(read_line, line.encode()) == outcome(long_way, line.encode())


def test_bytes_that_are_no_text_are_refused_also_where_no_reader_looks():
    line = LINE.replace("}", ',"later":"?"}').encode().replace(b"?", b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_line(line)


def test_without_msgspec_a_log_is_read_all_the_same(tmp_path, monkeypatch):
    records = [FULL, *synthetic_records(4, 3, first=1)]
    write_records(tmp_path, records)
    add_line(tmp_path, 1, LINE.replace("[6000.0,", "[NaN,"))
    fast = read_log(tmp_path)
    monkeypatch.setattr(line_module, "decode_line", lambda line: None)
    assert read_log(tmp_path) == fast and len(fast.records) == len(records) and len(fast.problems) == 1


def test_the_planes_of_a_record_are_its_fields():
    planes_PN = FULL.planes_PN
    assert planes_PN.dtype == np.float64 and planes_PN.shape == (4, 4)
    assert planes_PN[0].tolist() == [0, 1.5, 1e18, 7e-12] and planes_PN[3].tolist() == [3200.0] * 4
