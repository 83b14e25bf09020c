"""The format of a line: what is written comes back, and what cannot be is refused by name."""

import json

import pytest
from eprt.diagnostics import ExpertRows, WindowRecord, WindowWriter
from eprt.diagnostics.log.standing import LoggedProcess, Standing

from tests.unit.diagnostics.cases import record


def test_a_line_is_the_contract(tmp_path):
    WindowWriter(tmp_path).write(record(rank=2))
    (line,) = (tmp_path / "diagnose_rank2.log").read_text().splitlines()
    data = json.loads(line)
    assert data.pop("schema") == "eprt.diagnose/1"
    assert list(data) == [
        "window",
        "t_start",
        "t_end",
        "rank",
        "num_ranks",
        "node_of_rank",
        "num_calls",
        "dispatch_wait_us",
        "combine_wait_us",
        "recv_tokens",
        "compute_us",
        "sent_tokens",
    ]
    assert WindowRecord.from_line(line) == record(rank=2)


def test_expert_rows_are_an_extra_field_that_comes_back():
    one = record(1, num_ranks=2, experts=ExpertRows(2, (1, 3), ((0, 1), (-1, 1)), ((5, 1), (0, 7))))
    assert json.loads(one.to_line())["experts"]["rows"] == [[5, 1], [0, 7]]
    assert WindowRecord.from_line(one.to_line()) == one
    broken = one.to_line().replace('"rows":[[5,1],', '"rows":[[5],')
    with pytest.raises(ValueError, match="other shapes"):
        WindowRecord.from_line(broken)


def test_blocked_us_is_an_extra_field_that_comes_back():
    one = record(blocked_us=123.5)
    assert json.loads(one.to_line())["blocked_us"] == 123.5 and WindowRecord.from_line(one.to_line()) == one


def test_usage_process_and_standing_are_extra_fields_that_come_back():
    one = record(
        usage={"cpu_us": 5.0, "num_throttled": 3, "dreams": 1},
        process=LoggedProcess("host7", 4711, "NVIDIA H200, GPU 2"),
        standing=Standing(27.5, 2, "dispatch", 26.9, "steps"),
    )
    data = json.loads(one.to_line())
    assert data["usage"] == {"cpu_us": 5.0, "num_throttled": 3}, "a name that no reader knows is left out"
    assert data["process"] == {"host": "host7", "pid": 4711, "gpu": "NVIDIA H200, GPU 2"}
    assert data["standing"]["waits_for"] == 2 and WindowRecord.from_line(one.to_line()) == one
    later = one.to_line().replace('"cpu_us"', '"fans":-1,"cpu_us"')
    assert WindowRecord.from_line(later) == one


def test_fields_of_later_versions_are_ignored():
    data = {**json.loads(record().to_line()), "temperature": 55}
    assert WindowRecord.from_line(json.dumps(data)) == record()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "not a JSON object"),
        ('{"schema": "eprt.diagnose/9"}', "schema is 'eprt.diagnose/9', not 'eprt.diagnose/1'"),
        ('{"schema": "eprt.diagnose/1", "window": 1}', "fields are missing: t_start, t_end, rank, "),
        (record().to_line().replace("[0,0,0,0]", "7"), "node_of_rank is not a list"),
        (record().to_line().replace("}", ',"experts":[1]}'), "experts is not a table of expert rows"),
        (record().to_line().replace("}", ',"usage":{"cpu_us":-1}}'), r"usage.cpu_us=-1: must be a finite number"),
        (record().to_line().replace("}", ',"usage":7}'), "usage is not an object"),
        (record().to_line().replace("}", ',"process":{"host":"a"}}'), "process is not a host and a pid"),
        (record().to_line().replace("}", ',"standing":[]}'), "standing is not an object"),
        (record().to_line().replace("}", ',"standing":{"heard_s":"x"}}'), "standing.heard_s=x: must be seconds"),
        ("[" * 200_000, "nested too deeply"),
    ],
)
def test_a_line_that_is_none_of_this_log_says_why(line, message):
    with pytest.raises(ValueError) as error:
        WindowRecord.from_line(line)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 4}, r"rank 4 is not in 0\.\.3"),
        ({"sent_tokens": [1, 2]}, "sent_tokens has 2 entries for 4 ranks"),
        ({"combine_wait_us": [1, 2, float("inf"), 4]}, r"combine_wait_us\[2\]=inf"),
        ({"recv_tokens": [1, 2, 3, -4]}, r"recv_tokens\[3\]=-4"),
        ({"num_calls": -1}, "num_calls=-1"),
        ({"t_end": 1.0}, "t_end=1.0 is before"),
        ({"blocked_us": float("nan")}, "blocked_us=nan"),
    ],
)
def test_a_wrong_record_is_refused_before_it_is_written(changes, message):
    with pytest.raises(ValueError, match=message):
        record(**changes)
