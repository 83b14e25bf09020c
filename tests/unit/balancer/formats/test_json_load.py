"""Load in JSON: eprt's, a server's answers, SGLang's counts and RTP-LLM's lines."""

import json

import numpy as np
import pytest
from eprt.balancer import read_load

from tests.unit.balancer.formats.cases import server


def test_npz_and_json_loads_agree(tmp_path):
    load_WLE = np.arange(12.0).reshape(2, 2, 3)
    np.savez(tmp_path / "a.npz", load=load_WLE)
    (tmp_path / "a.json").write_text(json.dumps({"load": load_WLE.tolist()}))
    for name in ("a.npz", "a.json"):
        file = read_load(tmp_path / name)
        np.testing.assert_array_equal(file.load_WLE, load_WLE)
        np.testing.assert_array_equal(file.total(), load_WLE.sum(0))
        np.testing.assert_array_equal(file.total(last=1), load_WLE[1])
        with pytest.raises(ValueError, match="last=3: the file holds 2 windows"):
            file.total(last=3)


def test_a_servers_answer_is_a_load_file(tmp_path):
    path = tmp_path / "load.json"
    layers = [{"layer": 1, "per_rank": [3, 3], "per_expert": [1, 2, 3], "skew": 1.0}] * 2
    path.write_text(json.dumps({"schema": "eprt.load/1", "num_experts": 3, "ranks": [], "layers": layers}))
    assert read_load(path).total().tolist() == [[1.0, 2.0, 3.0]] * 2
    assert read_load(path).first_layer == 1
    path.write_text(json.dumps({"schema": "eprt.load/1", "num_experts": 0, "ranks": [], "layers": []}))
    with pytest.raises(ValueError, match="had not counted any load yet"):
        read_load(path)


def test_answers_of_a_server_are_differences(tmp_path):
    answers = [
        server([[1, 2]]),
        server([[4, 2]]),
        server([[4, 2]]),
        server([[0, 5]], "restarted"),
        server([[1, 5]], "restarted"),
    ]
    path = tmp_path / "load.jsonl"
    path.write_text("\n".join(map(json.dumps, answers)) + "\n\n")
    assert read_load(path).load_WLE[:, 0].tolist() == [[1, 2], [3, 0], [0, 5], [1, 0]]


def test_json_lines_are_windows(tmp_path):
    path = tmp_path / "load.jsonl"
    path.write_text('{"load": [[1, 2]]}\n{"load": [[3, 4]]}\n')
    assert read_load(path).load_WLE.tolist() == [[[1, 2]], [[3, 4]]]


def test_sglang_json_counts(tmp_path):
    rng = np.random.default_rng(0)
    count = rng.integers(0, 50, size=(2, 3, 8))
    (tmp_path / "decode.json").write_text(json.dumps({"logical_count": count.tolist()}))
    np.testing.assert_array_equal(read_load(tmp_path / "decode.json").load_WLE, count)


def test_rtp_llm(tmp_path):
    path = tmp_path / "gpu_load_20260101-000000.json"
    lines = [
        {
            "update_cnt": n,
            "gpu_loads": [[1, 2]],
            "log_stats": [[n, 2, 3]],
            "layer": 0,
            "plan": [[0, 1, 2, 0]],
            "phy2log": [],
        }
        for n in (1, 2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = read_load(path)
    assert file.format == "RTP-LLM" and file.load_WLE.tolist() == [[[1, 2, 3]], [[2, 2, 3]]]
    assert "moving sums" in file.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"load": [[1]]}\n{"load": [[1', r"line 2: not JSON: .*\(the file is cut off\?\)"),
        ('{"load": [[1]]}\n{"load": [[1, 2]]}', r"line 2: load has shape \(1, 2\), the first line has \(1, 1\)"),
        ('{"load": [[1]]}\n{"log_stats": [[1]]}', "lines of different kinds: JSON, RTP-LLM"),
        ('{"load": [[1]]}\n{"load": [[-1]]}', r"window 1: load\[layer 0, expert 0\] = -1.0"),
        (json.dumps(server([[2]])) + "\n" + json.dumps(server([[1]])), "line 2: the counters are smaller"),
        ('{"weight": [[1]]}', "none of the fields 'load', .*it has 'weight'"),
        ('{"load": [["a"]]}', "equally long lists of numbers"),
        ('{"schema": "eprt.load/1", "layers": [3]}', "'layers' must be a list of objects with a field 'per_expert'"),
        ("", "not JSON"),
    ],
)
def test_bad_json_is_named(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_load(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"load": [[1' + "0" * 400 + ", 1]]}", "a number beyond all measure"),
        ('{"load": [[1e308, 1e308]]}', "the sum of its load is beyond all numbers"),
        (
            '{"schema": "eprt.load/1", "layers": [{"layer": "3", "per_expert": [1, 2]}]}',
            r"layers\[0\].layer = '3': must be an integer of at least 0",
        ),
        (
            "\n".join(json.dumps(server(load)) for load in ([[1, 2]], [[1, 2, 3]])),
            r"line 2: the counters have shape \(1, 3\), in the line before \(1, 2\)",
        ),
    ],
)
def test_numbers_that_no_load_has_are_named(tmp_path, text, message):
    path = tmp_path / "load.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"load.jsonl: {message}"):
        read_load(path)
