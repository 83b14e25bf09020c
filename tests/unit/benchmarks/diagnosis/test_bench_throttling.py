"""The quota of a cgroup, as both versions take it, and what is counted."""

import os
from pathlib import Path

import pytest

from benchmarks.diagnosis import bench_throttling
from benchmarks.diagnosis.bench_throttling import QuotaGroup, check_quotas, main, quota_of, summary, taken_cores


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch) -> Path:
    """A hierarchy that, like the real ones, has files in a new folder."""
    make = Path.mkdir

    def mkdir(self, *arguments, **options):
        make(self, *arguments, **options)
        for name in ("cgroup.procs", *(["cpu.cfs_quota_us", "cpu.cfs_period_us"] if "cpu" in self.parts else [])):
            (self / name).touch()
        time = "throttled_time 3500000000" if "cpu" in self.parts else "throttled_usec 3500000"
        (self / "cpu.stat").write_text(f"nr_periods 60\nnr_throttled 45\n{time}\n")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", lambda self: None)
    return tmp_path


def test_a_process_has_a_quota_for_as_long_as_it_is_held(cgroups):
    home = cgroups / "cpu"
    home.mkdir()
    group = QuotaGroup(0.15, cgroups)
    (folder,) = (path for path in home.iterdir() if path.is_dir())
    assert (folder / "cpu.cfs_quota_us").read_text() == "15000"
    assert (folder / "cpu.cfs_period_us").read_text() == "100000"
    with group.holding(4711):
        assert (folder / "cgroup.procs").read_text() == "4711" and (home / "cgroup.procs").read_text() == ""
    assert (home / "cgroup.procs").read_text() == "4711"
    assert group.throttling() == {"throttled_share": 0.75, "throttled_s": 3.5}


def test_version_2_has_one_file_for_both(cgroups):
    group = QuotaGroup(0.2, cgroups)
    (folder,) = (path for path in cgroups.iterdir() if path.is_dir())
    assert (folder / "cpu.max").read_text() == "20000 100000"
    assert group.throttling() == {"throttled_share": 0.75, "throttled_s": 3.5}


def test_where_no_quota_can_be_set_the_benchmark_refuses_by_name(tmp_path, monkeypatch):
    missing = tmp_path / "cgroup"
    with pytest.raises(
        SystemExit, match=r"cgroup/eprt_throttling_\d+: No such file .* needs a writable cpu cgroup \(root\)"
    ):
        check_quotas(missing)

    monkeypatch.setattr(bench_throttling, "CGROUPS", missing)
    with pytest.raises(SystemExit, match="no quota can be set here"):
        main([])


def test_a_rank_that_takes_less_than_an_even_share_gets_as_much_smaller_a_quota():
    assert quota_of(0.15, taken=0.5, even_share=0.5) == quota_of(0.15, taken=0.9, even_share=0.5) == 0.15
    assert quota_of(0.2, taken=0.125, even_share=0.5) == pytest.approx(0.05)
    assert quota_of(0.2, taken=0.0, even_share=0.5) == 0.01
    assert 0.0 <= taken_cores(os.getpid(), 0.01) < 64


def test_a_trial_counts_only_where_every_cause_was_comp_and_the_quota_was_used_up():
    def trial(causes: list[str], named_s: float | None, back_s: float | None, share: float = 0.9) -> dict:
        return {
            "causes": causes,
            "named_after_s": named_s,
            "weight_back_after_s": back_s,
            "throttled_share": share,
        }

    idle = trial(["comp"], 3.0, 3.0, share=0.1)
    told = summary([trial(["comp"], 4.0, 6.0), trial(["comm", "comp"], 8.0, None), trial([], None, 2.0), idle], 1)
    assert told == {
        "trials": 3,
        "without_throttling": 1,
        "throttled_share_least": 0.9,
        "named": 2,
        "named_comp": 1,
        "other_causes": ["comm"],
        "median_s": 6.0,
        "weights_too_low": 1,
        "weights_back": 2,
        "weight_back_after_median_s": 4.0,
    }
