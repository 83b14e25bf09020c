"""Progress of loading: a line every ten seconds where nobody watches a terminal."""

import logging

import pytest

from eprt.serve.ranks import loading
from eprt.serve.ranks.channel import FrontendLostError


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loading.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_ten_seconds(clock, monkeypatch, caplog):
    monkeypatch.setattr(loading.sys.stderr, "isatty", lambda: False, raising=False)
    caplog.set_level(logging.INFO)
    with loading.loading_progress() as show:
        for second in range(61):
            clock[0] = float(second)
            show(second * 10**9, 60 * 10**9)
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "loading: 10.0 of 60.0 GB, 16 %, about 50 s left"
    assert told[-1] == "loading: 50.0 of 60.0 GB, 83 %, about 10 s left" and len(told) == 5


def test_what_is_fast_or_empty_tells_nothing(clock, monkeypatch, caplog):
    monkeypatch.setattr(loading.sys.stderr, "isatty", lambda: False, raising=False)
    caplog.set_level(logging.INFO)
    with loading.loading_progress() as show:
        clock[0] = 9.0
        show(5, 10)
        clock[0] = 99.0
        show(0, 10)
        show(10, 10)
    assert not caplog.records


def test_the_frontend_gets_a_message_twice_a_second_and_at_the_end(clock):
    sent, shown = [], []
    tell = loading.loading_messages(sent.append, lambda *progress: shown.append(progress))
    for step in range(11):
        clock[0] = step / 8
        tell(step, 10)
    assert [message.num_bytes for message in sent] == [0, 4, 8, 10] and {m.num_total for m in sent} == {10}
    assert shown == [(step, 10) for step in range(11)]


def test_a_frontend_that_is_lost_does_not_stop_the_reading():
    def send(message):
        raise FrontendLostError("gone")

    loading.loading_messages(send)(5, 10)


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(loading.sys.stderr, "isatty", lambda: True, raising=False)
    with loading.loading_progress() as show:
        show(5, 10)
        show(10, 10)
    assert capsys.readouterr().out == "", "on standard error"
