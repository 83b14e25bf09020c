"""Notices: a line when a finding or a silence begins, a line when it is over."""

from eprt.serve.diagnosis.notices import Notices


def test_what_began_in_the_newest_window_is_not_told_yet():
    def finding(kind: str, first: int, last: int, **who) -> dict:
        return {
            "kind": kind,
            "rank": None,
            "src": None,
            "dst": None,
            "cause": "comm",
            "evidence": "",
            "advice": "",
            "first_window": first,
            "last_window": last,
            **who,
        }

    notices = Notices()
    echo, link = finding("column", 7, 7, rank=2), finding("point", 7, 8, src=2, dst=5)
    assert not list(notices.finding_lines([echo], 7)) and not notices.current
    assert ["rank 2 waits for rank 5" in line for line in notices.finding_lines([link], 8)] == [True]
    stopped = finding("column", 8, 8, rank=4)
    assert ["rank 4" in line for line in notices.finding_lines([link, stopped], 9)] == [True]


def test_a_silence_is_told_when_it_begins_and_when_it_is_over():
    notices = Notices()
    assert list(notices.silence_lines([])) == []
    (line,) = notices.silence_lines([4, 2])
    assert line.startswith("ranks 2, 4 silent: no call in this window")
    assert list(notices.silence_lines([2, 4])) == []
    assert list(notices.silence_lines([4, 5])) == [
        "rank 5 silent: no call in this window while others made some; late, stopped or gone",
        "rank 2 no longer silent",
    ]
