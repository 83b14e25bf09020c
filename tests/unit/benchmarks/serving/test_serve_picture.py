"""Pictures of `eprt bench serve`, and what is refused before anything is sent."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.open_loop import OpenLoopLoad, ServedRequest, main, summary
from benchmarks.serving.serve_picture import draw, read_results
from eprt.serve.tiers.tier import parse_tiers

TIERS = parse_tiers(["max=1,0.1", "base=2,0.2"])


def served(ttft_s: float, itl_s: float, tier: str | None = None) -> ServedRequest:
    return ServedRequest(3, [ttft_s, ttft_s + itl_s, ttft_s + 2 * itl_s], tier=tier)


def load(*mix: tuple[str, float], rate: float = 2.0) -> OpenLoopLoad:
    return OpenLoopLoad(rate, 2.0, 4, 3, 0.0, 50, 0, mix)


def test_each_tier_has_its_share_of_those_that_asked_for_it():
    all_served = [served(0.5, 0.05, "max"), served(1.5, 0.05, "max"), served(1.5, 0.05, "base")]
    all_served.append(ServedRequest(3, error="429", refused=True, tier="base"))
    row = summary(load(("max", 1), ("base", 1)), all_served, 2.0, TIERS)
    assert (row["requests"], row["failed"]) == (4, 0), "who is refused has not failed"
    assert (row["max_share"], row["max_goodput"], row["max_tokens_s"], row["max_refused"]) == (0.5, 0.5, 1.5, 0)
    assert (row["base_share"], row["base_refused"]) == (0.5, 1)
    row = summary(load(), all_served, 2.0, TIERS)
    assert (row["max_share"], row["base_share"]) == (0.25, 0.75), "of all, where they ask for none"


def test_requests_ask_for_tiers_by_weight():
    asked = [body.get("service_tier") for _, body in load(("max", 1), ("base", 3), rate=100.0).requests()]
    assert asked.count("max") + asked.count("base") == 200 and 30 < asked.count("max") < 70
    assert all("service_tier" not in body for _, body in load().requests())


def result(folder: Path, name: str, **config: Any) -> Path:
    rows = []
    for rate in (2.0, 8.0):
        row = {"rate": rate, "tokens_s": 9 * rate, "goodput_2s_70ms": rate / 2}
        row |= {f"{what}_p{percent}_ms": 10 * rate for what in ("ttft", "itl") for percent in (50, 95, 99)}
        rows.append(row)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"config": {"model": "m", "input_tokens": 9, **config}, "rows": rows}))
    return path


def test_files_come_into_one_picture(tmp_path):
    files = [result(tmp_path, "a"), result(tmp_path, "b", label="apart")]
    results = read_results(files)
    assert [one.label for one in results] == ["a", "apart"]
    assert results[0].goodputs == {"goodput_2s_70ms": "2s, 70ms"}
    assert results[0].points("ttft_p50_ms", 1e-3) == ([2.0, 8.0], [0.02, 0.08])
    assert draw(results, tmp_path / "both.svg").read_text().count("apart, median") == 1
    tiers = {"max": "1 s, 30 ms", "base": "2 s, 70 ms"}
    (named,) = read_results([result(tmp_path, "c", tiers=tiers, mix={"max": 1, "base": 3})])
    assert named.goodputs == {"max_goodput": "max: 1 s, 30 ms", "base_goodput": "base: 2 s, 70 ms"}
    assert [named.share_of(column) for column in named.goodputs] == [0.25, 0.75]
    assert results[0].share_of("goodput_2s_70ms") == 1.0


@pytest.mark.parametrize(
    "flags, words",
    [
        (["x.json"], "x.json: result files are drawn; say where with --plot FILE"),
        (["x.json", "--plot", "y.png"], "x.json: cannot be read"),
        (["--plot", "y.bmp"], "--plot y.bmp: the name must end in .png, .svg or .pdf"),
        (["--tier", "max"], "--tier max: must be NAME="),
        (["--mix", "max=1"], "--mix max=1: say its limits, too, with --tier max=SECONDS,SECONDS"),
        (["--tier", "max=1,1", "--mix", "max"], "--mix max: must be NAME=WEIGHT"),
        (["--tier", "max=1,1", "--mix", "max=0"], "--mix max=0: the weight must be above 0"),
        (["--label", "a/b"], "--label a/b: must be letters"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
        (["--rate", "inf"], "--rate [inf]: must be above 0"),
        (["--rate", "1", "nan"], "--rate [1.0, nan]: must be above 0"),
        (["--rate", "1e5", "--seconds", "100"], "--rate 100000, --seconds: 1e+07 requests are more than 1000000"),
        (["--seconds", "inf"], "--seconds inf: must be above 0"),
        (["--input-tokens", "9" * 20], "--input-tokens 99999999999999999999: must be from 1"),
        (["--max-token-id", str(2**63)], "--max-token-id 9223372036854775808: must be at least 3 and below 2^31"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--plot", "/missing/y.png"], "--plot /missing/y.png: must name a file in a directory that is there"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, flags, words):
    assert main(["--url", "http://127.0.0.1:1", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"eprt bench serve: {words}")


def test_a_key_that_no_header_can_hold_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("EPRT_API_KEY", "ä")
    assert main(["--url", "http://127.0.0.1:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("eprt bench serve: environment variable EPRT_API_KEY: must be printable ASCII")


def test_a_disk_that_takes_no_results_leaves_the_table(capsys, monkeypatch, tmp_path):
    async def drive(*_given):
        return [served(0.5, 0.05)], 2.0

    def refuse(*_given):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("benchmarks.serving.open_loop.find_model", lambda *_given: "demo")
    monkeypatch.setattr("benchmarks.serving.open_loop.wait_until_loaded", lambda *_given: None)
    monkeypatch.setattr("benchmarks.serving.open_loop.drive", drive)
    monkeypatch.setattr("benchmarks.tools.report.BenchmarkReport.write", refuse)
    assert main(["--rate", "4", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "goodput" in told.out
    assert told.err == f"eprt bench serve: --out {tmp_path}: Read-only file system: nothing was written\n"
