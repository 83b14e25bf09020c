"""The tables of docs/gpu.md, from a small record."""

from benchmarks.suite import tables

CONTENT = {
    "commit": "0123abcd0123abcd",
    "clean": True,
    "date": "2026-11-22",
    "config": {
        "gpus": ["NVIDIA H200", "NVIDIA H200"],
        "driver": "580.1",
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "halves": {"quick": {"seconds": 171.4, "finished": True}, "long": {"seconds": 60.0, "finished": False}},
    },
    "rows": [
        {"test": "test_a.py::test_x[2]", "half": "quick", "outcome": "passed", "seconds": 10.4, "why": ""},
        {
            "test": "test_a.py::test_x[4]",
            "half": "quick",
            "outcome": "skipped",
            "seconds": 0.0,
            "why": "needs 4 | GPUs",
        },
        {
            "test": "test_a.py::test_y[4]",
            "half": "quick",
            "outcome": "skipped",
            "seconds": 0.0,
            "why": "needs 4 | GPUs",
        },
        {"test": "test_a.py::test_z", "half": "long", "outcome": "failed", "seconds": 3.0, "why": "AssertionError"},
        {"test": "test_a.py::test_w", "half": "long", "outcome": "stopped", "seconds": 1.0, "why": ""},
        {"test": "test_gone.py", "half": "quick", "outcome": "failed", "seconds": 0.1, "why": "ImportError"},
    ],
}


def test_the_run_says_what_ran_where():
    lines = tables.run_table(CONTENT).splitlines()
    assert lines[2:] == [
        "| commit | `0123abcd0123` |",
        "| date | 2026-11-22 |",
        "| GPUs | 2 NVIDIA H200 |",
        "| with | driver 580.1, CUDA 13.0, torch 2.11.0+cu130 |",
        "| quick half | 171 s |",
        "| long half | 60 s, stopped before its end |",
    ]


def test_ranks_that_shared_a_gpu_are_not_taken_for_nvlink():
    shared = {**CONTENT, "config": {**CONTENT["config"], "ranks_per_gpu": 4}}
    assert "| ranks | up to 4 shared a GPU, which took turns among them: nothing went over NVLink |" in (
        tables.run_table(shared).splitlines()
    )


def test_a_dirty_tree_and_a_record_without_a_run_say_so():
    assert "`0123abcd0123` with changes that are not committed" in tables.run_table({**CONTENT, "clean": False})
    nothing = {"commit": None, "clean": None, "date": None, "config": {}, "rows": []}
    assert tables.run_table(nothing).splitlines()[2:] == ["| commit | not run since records are kept |", "| date | - |"]
    assert len(tables.file_table(nothing).splitlines()) == 2


def test_each_file_and_half_has_a_row(tmp_path):
    (tmp_path / "test_a.py").write_text('"""Kernels | of a\nGPU.\n\nMore."""\n')
    lines = tables.file_table(CONTENT, tmp_path).splitlines()
    assert lines[0] == "| file | what | half | passed | failed | skipped | seconds |"
    assert lines[2:] == [
        "| `test_a.py` | Kernels / of a GPU | quick | 1 | 0 | 2: needs 4 / GPUs | 10 |",
        "| `test_a.py` | Kernels / of a GPU | long | 0 | 1: `test_z`; stopped: 1: `test_w` | 0 | 4 |",
        "| `test_gone.py` | (gone) | quick | 0 | 1: `test_gone.py` | 0 | 0 |",
    ]
