"""`eprt diagnose`: exit statuses, JSON and text, of a directory and of a server; arguments; the page until Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import pytest
from eprt.diagnostics import Report, WindowRecord
from eprt.diagnostics.__main__ import main
from eprt.diagnostics.page.server_source import Client

from tests.unit.diagnostics.cases import add_line, late, synthetic_records, write_records
from tests.unit.diagnostics.speaker import Speaker
from tests.web.logs import LATE_RANK, make_window


def test_what_was_skipped_is_on_standard_error_and_in_the_json(tmp_path, capsys):
    write_records(tmp_path, synthetic_records())
    (tmp_path / "diagnose_rank1.log").unlink()
    add_line(tmp_path, 0, "{")
    assert main([str(tmp_path), "--json"]) == 0
    streams = capsys.readouterr()
    problems = json.loads(streams.out)["problems"]
    assert problems["skipped_lines"] == 1 and len(problems["first"]) == 2
    assert "diagnose_rank0.log:7" in streams.err and "nothing from rank 1 of 4" in streams.err


def test_exit_status_and_json(tmp_path, capsys):
    write_records(tmp_path / "clean", synthetic_records(8))
    write_records(tmp_path / "late", synthetic_records(8, faults=[late(3)]))
    assert main([str(tmp_path / "clean"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": "eprt.findings/1",
        "num_ranks": 8,
        "windows": 6,
        "windows_per_entry": 1,
        "findings": [],
        "early": [],
        "problems": {"skipped_lines": 0, "first": []},
    }
    assert main([str(tmp_path / "late"), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert list(finding) == [
        "kind",
        "rank",
        "src",
        "dst",
        "cause",
        "score",
        "ratio",
        "first_window",
        "last_window",
        "confidence",
        "evidence",
        "advice",
        "nodes",
        "tier",
        "members",
        "host",
        "pid",
        "gpu",
        "t_start",
        "t_end",
        "active",
        "burst",
        "cost",
        "place",
        "muted_until",
        "mute_note",
    ]
    assert main([str(tmp_path / "late"), "--text"]) == 1
    text = capsys.readouterr().out
    assert "column rank 3" in text and "8 ranks, 6 windows" in text


def test_only_what_lasts_is_status_1_unless_it_is_asked_what_ever_was(tmp_path, capsys):
    write_records(tmp_path, synthetic_records(8, 12, faults=[late(3, windows=(2, 6))]))
    assert main([str(tmp_path), "--json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["rank"], finding["active"]) == (3, False)
    assert main([str(tmp_path), "--text", "--ever"]) == 1
    assert "column rank 3" in capsys.readouterr().out
    assert main([str(tmp_path), "--json", "--windows", "0-6"]) == 1, "it lasted then"


def test_a_muted_finding_wakes_nobody_until_its_end(tmp_path, capsys):
    write_records(tmp_path, synthetic_records(8, faults=[late(3)]))
    assert main([str(tmp_path), "--mute", "column:3", "--until", "12h", "--note", "its GPU is on order"]) == 0
    assert "column:3 is muted until" in capsys.readouterr().out
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["muted_until"] > time.time()
    assert main([str(tmp_path), "--text"]) == 0 and "muted until" in capsys.readouterr().out
    assert main([str(tmp_path), "--unmute", "column:3"]) == 0 and main([str(tmp_path), "--json"]) == 1
    assert main([str(tmp_path), "--unmute", "column:3"]) == 2
    assert main([str(tmp_path), "--mute", "column:3", "--until", "2020-01-01"]) == 2
    assert "2020-01-01: is over already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("column:99", "column:99: there is no rank 99; the job has ranks 0 to 7"),
        ("row:8", "there is no rank 8"),
        ("hang:0-8", "there is no rank 8"),
        ("point:2-2", "both ends are the same"),
        ("node:2", "there is no node 2; the job has nodes 0, 1"),
        ("path:0-7", "there is no node 7"),
        (
            "tier:between rooms",
            "the tiers are inside nodes, between halves of a node, between nodes, between racks, between all",
        ),
    ],
)
def test_a_mute_that_no_finding_of_the_job_can_meet_is_refused(tmp_path, capsys, place, why):
    write_records(tmp_path, [replace(r, node_of_rank=(0, 0, 0, 0, 1, 1, 1, 1)) for r in synthetic_records(8)])
    assert main([str(tmp_path), "--mute", place, "--until", "12h"]) == 2
    assert why in capsys.readouterr().err and not (tmp_path / "mutes.json").exists()
    assert main([str(tmp_path), "--unmute", place]) == 2, "it is not muted"


def test_a_mute_is_of_the_run_that_is_looked_at(tmp_path, capsys):
    write_records(tmp_path, synthetic_records(8))
    (tmp_path / "topology.json").write_text('{"schema": "eprt.topology/1", "levels": {"room": [0,0,0,0,1,1,1,1]}}')
    tier = [str(tmp_path), "--mute", "tier:between rooms", "--until", "1h"]
    assert main(tier) == 2 and main([*tier, "--topology", str(tmp_path / "topology.json")]) == 0
    assert main([str(tmp_path), "--mute", "node:0", "--until", "1h"]) == 2
    assert "the job has one node" in capsys.readouterr().err
    assert main([str(tmp_path), "--mute", "column:03", "--until", "1h"]) == 0
    assert "column:3 is muted" in capsys.readouterr().out, "as findings spell it"
    assert main([str(tmp_path), "--mute", "column:3", "--until", "1h", "--run", "2"]) == 2
    assert "there is no run 2" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty"), "--mute", "column:3", "--until", "1h"]) == 2
    assert "holds no diagnose_rank*.log" in capsys.readouterr().err


def test_a_baseline_without_any_wait_is_not_saved(tmp_path, capsys):
    silent = [
        replace(r, dispatch_wait_us=(0.0,) * 4, combine_wait_us=(0.0,) * 4, num_calls=0) for r in synthetic_records()
    ]
    write_records(tmp_path, silent)
    assert main([str(tmp_path), "--save-baseline", str(tmp_path / "usual.npz")]) == 2
    assert "nothing to compare with" in capsys.readouterr().err and not (tmp_path / "usual.npz").exists()


def test_a_servers_finding_is_muted_by_the_server(speaker, capsys):
    asked = ["--url", speaker, "--api-key", "secret"]
    assert main([*asked, "--mute", "column:3", "--until", "12h", "--note", "on order"]) == 0
    assert "column:3 is muted until" in capsys.readouterr().out
    assert main([*asked, "--unmute", "column:3"]) == 0
    assert Speaker.asked == [f"/v1/eprt/diagnose/mutes column:3 {end}" for end in ("False on order", "True None")]
    assert main(["--url", speaker, "--unmute", "column:3"]) == 2
    assert "403 Forbidden: it needs the admin key" in capsys.readouterr().err


def test_unreadable_input_is_status_2(tmp_path, capsys):
    assert main([str(tmp_path / "missing")]) == 2 and "missing" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2 and "holds no diagnose_rank*.log" in capsys.readouterr().err
    (tmp_path / "diagnose_rank0.log").write_text("garbage\n")
    assert main([str(tmp_path)]) == 2
    assert "diagnose_rank0.log:1: " in capsys.readouterr().err


def test_a_broken_line_is_reported_on_standard_error(tmp_path, capsys):
    write_records(tmp_path, synthetic_records(4))
    with (tmp_path / "diagnose_rank1.log").open("a") as file:
        file.write("{\n")
    assert main([str(tmp_path), "--json"]) == 0
    streams = capsys.readouterr()
    assert "diagnose_rank1.log:7: " in streams.err and json.loads(streams.out)["windows"] == 6


def test_text_has_colours_where_they_are_wanted(log_8, capsys):
    assert main([str(log_8), "--text"]) == 1
    plain = capsys.readouterr().out
    assert "\x1b" not in plain and f"column rank {LATE_RANK}" in plain, "no terminal, no colours"
    assert main([str(log_8), "--text", "--color", "always"]) == 1
    assert "\x1b[" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either DIR or --url"),
        (["x", "--url", "http://y"], "either DIR or --url"),
        (["x", "--json", "--text"], "not allowed with"),
        (["x", "--port", "65536"], "0..65535"),
        (["x", "--windows", "5-3"], "5-3: must be A-B, A- or A"),
        (["x", "--mute", "column:3"], "a mute has an end"),
        (["x", "--mute", "column", "--until", "7d"], "column: must be column:RANK"),
        (["--url", "http://y", "--mute", "job"], "a mute has an end"),
        (["x", "--windows", "-"], "-: must be A-B, A- or A"),
        (["x", "--note", "on order"], "--note is the reason of a --mute"),
        (["x", "--mute", "job", "--until", "1h", "--unmute", "row:1"], "one at a time"),
        (["x", "--unmute", "job", "--windows", "1-2"], "--windows does nothing beside --mute"),
        (["x", "--mute", "job", "--until", "1h", "--save-baseline", "f"], "--save-baseline does nothing beside --mute"),
        (["x", "--text", "--method", "zscore", "--baseline", "f"], "--baseline is for --method robust"),
        (["x", "--json", "--method", "zscore", "--topology", "f"], "--topology is for --method robust"),
        (["x", "--method", "zscore"], "is for DIR, with --text or --json"),
        (["--url", "http://y", "--text", "--method", "zscore"], "is for DIR, with --text or --json"),
        (["--url", "http://y", "--windows", "1-2"], "--windows is for DIR"),
        (["--url", "http://y", "--save-baseline", "f"], "--save-baseline is for DIR"),
        (["x", "--text", "--port", "80"], "--port is for the page, which --text does not show"),
        (["x", "--mute", "job", "--until", "1h", "--open"], "--open is for the page, which --mute does not show"),
        (["x", "--json", "--host", "0.0.0.0"], "--host is for the page, which --json does not show"),
        (["x", "--text", "--host", "127.0.0.1"], "--host is for the page, which --text does not show"),
        (["x", "--json", "--allow-host", "h"], "--allow-host is for the page, which --json does not show"),
        (["x", "--api-key", "k"], "--api-key is for --url"),
        (["x", "--save-baseline", "f", "--text"], "--text does nothing beside --save-baseline"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--text"], ["--json"]])
def test_unreadable_input_is_status_2_in_every_form(tmp_path, capsys, form):
    assert main([str(tmp_path / "missing"), *form]) == 2
    assert main(["--url", "http://127.0.0.1:9", *form]) == 2
    assert main(["--url", "127.0.0.1:9", *form]) == 2
    errors = capsys.readouterr().err
    assert "missing" in errors and "127.0.0.1:9/v1/eprt/diagnose" in errors and "must begin with http://" in errors


def test_what_cannot_be_read_is_said_without_error_numbers(log_8, tmp_path, capsys):
    os.mkfifo(tmp_path / "diagnose_rank0.log")
    for arguments, message in (
        ([str(tmp_path / "missing")], f"{tmp_path / 'missing'}: No such file or directory"),
        ([str(tmp_path)], "diagnose_rank0.log is not a regular file"),
        ([str(log_8), "--windows", "999999-"], "has the windows 0 to "),
        ([str(log_8), "--run", "7"], "holds 1 run; there is no run 7"),
    ):
        assert main([*arguments, "--json"]) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("eprt diagnose: ") and message in errors and "Errno" not in errors


@pytest.mark.parametrize("form", ["--text", "--json"])
def test_a_reader_that_has_enough_is_no_error(log_8, form):
    command = [sys.executable, "-m", "eprt.diagnostics", str(log_8), form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(200) == 1 and "Broken pipe" not in errors and "BrokenPipe" not in errors


def test_a_port_that_is_taken(log_8, server_8, capsys):
    port = server_8.server_port
    assert main([str(log_8), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_the_command_serves_the_page_until_it_is_interrupted(log_8):
    command = [sys.executable, "-m", "eprt.diagnostics", str(log_8), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert url and "ssh -L" in process.stdout.readline()
        with urllib.request.urlopen(url[0], timeout=100) as reply:
            assert b"<title>eprt diagnose</title>" in reply.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) == 0
        assert process.stderr is not None and process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


# ---- a running server -----------------------------------------------------------------------------------------------


def test_a_servers_findings(speaker, capsys):
    assert main(["--url", speaker, "--api-key", "secret", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == Report.of_records(Speaker.records).to_json()
    assert main(["--url", speaker + "/v1/", "--api-key", "secret", "--text"]) == 1
    assert "point rank 2 <- rank 6" in capsys.readouterr().out
    assert main(["--url", speaker, "--json"]) == 2
    assert "401" in (error := capsys.readouterr().err) and "--api-key" in error


@pytest.mark.parametrize(
    "broken, named",
    [
        ({"num_ranks": None}, "num_ranks is null"),
        ({"windows": "3"}, 'windows is "3"'),
        ({"findings": {"rank": 1}}, "findings is"),
        ({"findings": ["slow"]}, 'findings[0].kind is "slow"'),
        ({"findings": [{"kind": "column", "rank": 1}]}, "findings[0].cause is null"),
        ({"schema": "eprt.findings/9"}, "schema"),
    ],
)
@pytest.mark.parametrize("form", ["--text", "--json"])
def test_an_answer_that_breaks_the_schema_is_named(monkeypatch, capsys, broken, named, form):
    whole = {**Report.of_records(make_window(0, 8, 4)).to_json(), "records": [], **broken}
    monkeypatch.setattr(Client, "get", lambda self, path: dict(whole))
    assert main(["--url", "http://somewhere", form]) == 2
    assert named in (error := capsys.readouterr().err) and "http://somewhere" in error and "Traceback" not in error


def test_a_saved_baseline_and_a_topology(tmp_path, capsys):
    write_records(tmp_path / "good", synthetic_records(8))
    usual, racks = str(tmp_path / "usual.npz"), tmp_path / "racks.json"
    assert main([str(tmp_path / "good"), "--save-baseline", usual]) == 0
    assert f"{usual} has what is usual in 6 windows" in capsys.readouterr().out
    slow = [slower(one, 3) for one in synthetic_records(8, seed=1)]
    write_records(tmp_path / "slow", slow)
    assert main([str(tmp_path / "slow"), "--json"]) == 0
    capsys.readouterr()
    assert main([str(tmp_path / "slow"), "--json", "--baseline", usual]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["kind"] == "job" and finding["rank"] is None
    assert main([str(tmp_path / "slow"), "--text", "--baseline", usual]) == 1
    text = capsys.readouterr().out
    assert "job  3" in text and "most ranks compute longer than before" in text
    racks.write_text('{"schema":"eprt.topology/1","levels":{"rack":[0,0,0,0,1,1,1,1]}}')
    assert main([str(tmp_path / "good"), "--json", "--topology", str(racks)]) == 0


def test_a_run_with_findings_is_saved_with_a_warning(tmp_path, capsys):
    write_records(tmp_path / "late", synthetic_records(8, faults=[late(3)]))
    assert main([str(tmp_path / "late"), "--save-baseline", str(tmp_path / "usual.npz")]) == 1
    assert "not a good run to compare with" in capsys.readouterr().err and (tmp_path / "usual.npz").exists()


@pytest.mark.parametrize("option", ["--baseline", "--save-baseline", "--topology"])
def test_what_a_log_is_compared_with_is_not_for_a_server(option, capsys):
    with pytest.raises(SystemExit):
        main(["--url", "http://127.0.0.1:1", option, "x", "--json"])
    assert f"{option} is for DIR" in capsys.readouterr().err


def test_a_file_to_compare_with_that_is_none(tmp_path, capsys):
    write_records(tmp_path / "good", synthetic_records(8))
    (tmp_path / "usual.npz").write_text("usual")
    assert main([str(tmp_path / "good"), "--json", "--baseline", str(tmp_path / "usual.npz")]) == 2
    assert "is not a baseline (eprt diagnose DIR --save-baseline FILE writes one)" in capsys.readouterr().err


def slower(one: WindowRecord, factor: float) -> WindowRecord:
    waits = {name: tuple(factor * us for us in getattr(one, name)) for name in ("dispatch_wait_us", "combine_wait_us")}
    return replace(one, compute_us=factor * one.compute_us, **waits)
