"""Calls beside the step: results, errors, and the end of the thread."""

import threading

import pytest

from eprt.engine.side_thread import SideThread


def test_results_come_back_one_by_one():
    thread = SideThread("adder", lambda a, b: (a + b, threading.current_thread().name))
    for i in range(3):
        assert not thread.is_busy
        thread.start_call(i, 10)
        assert thread.is_busy
        assert thread.finish_call() == (i + 10, "adder")
    thread.close()


def test_errors_are_raised_where_the_result_is_wanted():
    thread = SideThread("divider", lambda a, b: a // b)
    thread.start_call(1, 0)
    with pytest.raises(ZeroDivisionError):
        thread.finish_call()
    thread.start_call(7, 2)
    assert thread.finish_call() == 3
    thread.close()


def test_it_runs_beside_its_caller():
    may_go_on = threading.Event()
    thread = SideThread("waiter", lambda: may_go_on.wait(10))
    thread.start_call()
    may_go_on.set()
    assert thread.finish_call()
    thread.close()


def test_close_ends_the_thread_and_does_nothing_where_none_was_started():
    before = threading.active_count()
    thread = SideThread("short", int)
    thread.close()
    thread.start_call()
    assert thread.finish_call() == 0 and threading.active_count() == before + 1
    thread.close()
    assert threading.active_count() == before
