"""Whether a result file is of this code, and why not."""

import json

import pytest

from benchmarks.tools import measured, provenance
from benchmarks.tools.measured import Measured

TABLE = """
[pending]
"4 GPUs" = ["b"]
[code]
kernels = ["csrc/cuda", "eprt/gpu"]
engine = ["eprt/engine"]
[[measured]]
files = ["a", "b"]
command = "python -m benchmarks.x"
needs = "a GPU"
code = ["kernels", "engine"]
simulated = true
"""


def test_each_file_has_its_command_and_code(tmp_path):
    (tmp_path / "results.toml").write_text(TABLE)
    files = measured.load(tmp_path / "results.toml")
    code = ("csrc/cuda", "eprt/gpu", "eprt/engine")
    assert files["a"] == Measured("a", "python -m benchmarks.x", "a GPU", code, True, "")
    assert files["b"].pending == "4 GPUs"


@pytest.mark.parametrize(
    "head, in_history, changed, why",
    [
        ({"commit": "abc123", "clean": True}, True, [], None),
        ({"commit": "abc123"}, True, [], None),
        ({"commit": None}, True, [], "it does not say which commit was measured"),
        ({"commit": "abc123"}, False, [], "commit abc123 is not in the history"),
        ({"commit": "abc123+changes"}, True, [], "the tree that was measured differs from commit abc123"),
        ({"commit": "abc123", "clean": False}, True, [], "the tree that was measured differs from commit abc123"),
        ({"commit": "abc123", "clean": True}, True, ["a.cu", "b.cu"], "2 files of what it measures changed since"),
    ],
)
def test_a_result_of_other_code_says_why(head, in_history, changed, why, monkeypatch, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({**head, "rows": []}))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    monkeypatch.setattr(provenance, "is_in_history", lambda commit: in_history and commit == "abc123")
    monkeypatch.setattr(provenance, "changed_since", lambda commit, paths: changed)
    told = Measured("a", "", "", ("eprt",), False, "").why_old()
    assert told == why if why is None else told.startswith(why)
