"""The quota of a cgroup, as both versions take it, and what is counted."""

from pathlib import Path

import pytest

from benchmarks.diagnosis.bench_throttling import QuotaGroup, summary


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch) -> Path:
    """A hierarchy that, like the real ones, has files in a new folder."""
    make = Path.mkdir

    def mkdir(self, *arguments, **options):
        make(self, *arguments, **options)
        for name in ("cgroup.procs", *(["cpu.cfs_quota_us", "cpu.cfs_period_us"] if "cpu" in self.parts else [])):
            (self / name).touch()

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


def test_version_2_has_one_file_for_both(cgroups):
    QuotaGroup(0.2, cgroups)
    (folder,) = (path for path in cgroups.iterdir() if path.is_dir())
    assert (folder / "cpu.max").read_text() == "20000 100000"


def test_a_trial_counts_only_where_every_cause_was_comp():
    def trial(causes: list[str], named_s: float | None, back_s: float | None) -> dict:
        return {"causes": causes, "named_after_s": named_s, "weight_back_after_s": back_s}

    told = summary([trial(["comp"], 4.0, 6.0), trial(["comm", "comp"], 8.0, None), trial([], None, 2.0)], 1)
    assert told == {
        "trials": 3,
        "named": 2,
        "named_comp": 1,
        "other_causes": ["comm"],
        "median_s": 6.0,
        "weights_too_low": 1,
        "weights_back": 2,
        "weight_back_after_median_s": 4.0,
    }
