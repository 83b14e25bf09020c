"""Where a rank stood, as JSON: what is there comes back, and what cannot be is refused by name."""

from dataclasses import asdict

import pytest
from eprt.diagnostics.log.standing import LoggedProcess, Standing


def test_a_standing_comes_back():
    for one in (Standing(0.4), Standing(3.5, 2, "combine", 3.2, "stopped")):
        assert Standing.from_json(asdict(one)) == one


@pytest.mark.parametrize(
    "data", [None, {}, {"heard_s": -1.0, "waited_s": 0}, {"heard_s": 1.0, "waited_s": 0, "waits_for": -1}]
)
def test_what_is_none_is_refused(data):
    with pytest.raises(ValueError, match="standing"):
        Standing.from_json(data)


def test_a_process_comes_back_and_long_names_are_cut():
    one = LoggedProcess("h", 7)
    assert LoggedProcess.from_json(asdict(one)) == one
    long = LoggedProcess.from_json({"host": "h" * 1000, "pid": 1, "gpu": "g" * 1000})
    assert len(long.host) == 256 and long.gpu is not None and len(long.gpu) == 256
    for bad in ({"host": "h", "pid": -1}, {"host": "h", "pid": True}, {"pid": 1}, []):
        with pytest.raises(ValueError, match="host and a pid"):
            LoggedProcess.from_json(bad)
