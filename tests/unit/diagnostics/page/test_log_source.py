"""A log directory as a source: open at once, followed while it grows, rotates and begins anew; figures from the log."""

import numpy as np
import pytest
from eprt.diagnostics import WindowWriter
from eprt.diagnostics.page.log_source import LogSource

from tests.unit.diagnostics.cases import add_line, matrices_of, synthetic_records, write_records
from tests.unit.diagnostics.page.cases import opened
from tests.web.conftest import wait_until
from tests.web.logs import CALLS, make_window, write_log


def test_the_line_of_a_late_rank_is_added_to_its_window(tmp_path):
    *in_time, late = make_window(0, 4, 4)
    write_records(tmp_path, in_time)
    with opened(tmp_path) as source:
        assert source.overview()["windows"]["ranks"] == [3]
        assert np.isnan(source.window(0).planes_PNN[0, 3]).all(), "no data, not zero"
        WindowWriter(tmp_path).write(late)
        wait_until(lambda: source.overview()["windows"]["ranks"] == [4], "the late line")
        expected = np.array(late.dispatch_wait_us) / CALLS
        np.testing.assert_allclose(source.window(0).planes_PNN[0, 3], expected)
        np.testing.assert_allclose(source.window(None).planes_PNN[0, 3], expected)


def test_rotation_while_somebody_looks(tmp_path):
    size = len(make_window(0, 2, 2)[0].to_line())
    writer = WindowWriter(tmp_path, max_bytes=3 * size)
    for window in range(3):
        for record in make_window(window, 2, 2):
            writer.write(record)
    with opened(tmp_path) as source:
        for window in range(3, 6):
            for record in make_window(window, 2, 2):
                writer.write(record)
        wait_until(lambda: 5 in source.overview()["windows"]["window"], "the windows after the rotation")
        assert (tmp_path / "diagnose_rank0.log.1").exists()
        expected = make_window(1, 2, 2)[0].dispatch_wait_us[1] / CALLS
        assert source.window(1).planes_PNN[0, 0, 1] == pytest.approx(expected)


def test_broken_lines_are_told(tmp_path):
    write_log(tmp_path, 4, 2, 4)
    add_line(tmp_path, 1, "{not json")
    with opened(tmp_path) as source:
        problems = source.overview()["problems"]
        assert problems["count"] == 1 and "diagnose_rank1.log:3" in problems["first"][0]


def test_unreadable_directories_are_refused_with_the_reason(tmp_path):
    with pytest.raises(OSError, match="missing"):
        LogSource(tmp_path / "missing")
    with pytest.raises(ValueError, match="holds no diagnose_rank"):
        LogSource(tmp_path)
    (tmp_path / "diagnose_rank0.log").write_text("garbage\n")
    with pytest.raises(ValueError, match=r"diagnose_rank0.log:1"):
        LogSource(tmp_path)


def test_a_window_that_is_not_there(tmp_path):
    with opened(write_log(tmp_path, 2, 2, 2)) as source:
        assert source.records(2) == []
        with pytest.raises(LookupError, match="window 2: no usable line"):
            source.window(2)


def test_only_the_windows_asked_for_are_shown(tmp_path):
    with opened(write_records(tmp_path, synthetic_records(4, 9)), windows=(3, 5)) as source:
        assert source.overview()["windows"]["window"] == [3, 4, 5] and source.overview()["findings"]["windows"] == 3
        assert source.window(None).calls_N.tolist() == [3 * 5800] * 4


def test_the_page_goes_over_to_a_run_that_begins(tmp_path):
    write_records(tmp_path, synthetic_records(8, 8))
    with opened(tmp_path) as source:
        assert (source.overview()["run"], source.overview()["num_runs"]) == (1, 1)
        later = synthetic_records(8, 3, seed=1, start_s=200.0)
        write_records(tmp_path, later)
        wait_until(lambda: source.overview()["run"] == 2 and source.overview()["findings"]["windows"] == 3, "the run")
        overview = source.overview()
        assert overview["windows"]["window"] == [0, 1, 2] and overview["num_runs"] == 2
        assert source.window(0).planes_PNN[0, 0, 1] == pytest.approx(later[0].dispatch_wait_us[1] / 5800)
    with opened(tmp_path, run=1) as pinned:
        assert pinned.overview()["windows"]["window"] == list(range(8))
        expected = synthetic_records(8, 8)[0].dispatch_wait_us[1] / 5800
        assert pinned.window(0).planes_PNN[0, 0, 1] == pytest.approx(expected)


def test_windows_of_a_joined_row_are_added_up(tmp_path, monkeypatch):
    monkeypatch.setattr("eprt.diagnostics.page.log_source.most_rows", lambda num_ranks: 4)
    with opened(write_records(tmp_path, synthetic_records(4, 16))) as source:
        table = source.overview()["windows"]
        assert (table["window"], table["last"]) == ([0, 4, 8, 12], [3, 7, 11, 15])
        full = matrices_of(synthetic_records(4, 16))
        expected = full.dispatch_us_WNN[4:8].mean(axis=0)
        np.testing.assert_allclose(source.window(4).planes_PNN[0], expected, rtol=1e-6)
        link = source.link(1, 2)
        assert link["first"] == list(range(16))
        assert link["series"]["dispatch"][5] == pytest.approx(full.dispatch_us_WNN[5, 1, 2], rel=1e-3)
        usual = np.median([full.wait_us_WNN[3, i, j] for i in range(4) for j in range(4) if i != j])
        assert link["usual"]["wait"][3] == pytest.approx(usual, rel=1e-3)
        with pytest.raises(KeyError):
            source.link(4, 0)
