"""The page's answers: its figures are the log's, and nothing is answered that is not its own."""

import json

import numpy as np
import pytest
from eprt.diagnostics import analyse
from eprt.diagnostics.page.page import Page
from eprt.diagnostics.windows.history import SERIES

from tests.unit.diagnostics.page.cases import opened
from tests.web.logs import CALLS, LATE_RANK, MIGRATED_WINDOW, SLOTS, make_window, write_log


def get(page: Page, path: str):
    reply = page.reply(path)
    assert (reply.status, reply.media_type) == (200, "application/json"), path
    return json.loads(reply.body)


def get_packed(page: Page, path: str) -> tuple[dict, np.ndarray]:
    head, _, rest = page.reply(path).body.partition(b"\n")
    assert (len(head) + 1) % 4 == 0, "float32 arrays start at a multiple of four"
    return json.loads(head), np.frombuffer(rest, dtype="<f4")


@pytest.fixture(scope="module")
def page_8(log_8):
    with opened(log_8) as source:
        yield Page(source)


def test_overview(page_8, log_8):
    overview = get(page_8, "api/overview")
    assert overview["schema"] == "eprt.page/1" and overview["name"] == str(log_8)
    assert overview["num_ranks"] == 8 and overview["node_of_rank"] == [0] * 4 + [1] * 4
    assert overview["windows"]["window"] == list(range(6)) and overview["windows"]["calls"] == [CALLS] * 6
    assert overview["windows"]["ranks"] == [8] * 6 and overview["progress"] == 1
    peaks = overview["windows"]["peak"]
    assert max(peaks[:2]) < 2.1 < min(peaks[2:]), "the late rank shows from window 2 on"
    told = analyse(log_8).to_json()
    unmuted = [{**finding, "muted_until": None} for finding in told["findings"]]
    assert overview["findings"] == {**told, "findings": unmuted}
    assert overview["problems"] == {"count": 0, "first": []}


@pytest.mark.parametrize("window", range(6))
def test_a_window_is_the_logs_window(page_8, window):
    header, floats = get_packed(page_8, f"api/windows/{window}")
    assert header["window"] == window and header["planes"] == ["dispatch", "combine", "tokens"]
    assert header["t_start"] == 1_760_000_000 + 10 * window
    planes_PNN, compute_us_N, calls_N = floats[:192].reshape(3, 8, 8), floats[192:200], floats[200:]
    for record in make_window(window, 8, 4):
        logged = (record.dispatch_wait_us, record.combine_wait_us, record.recv_tokens)
        np.testing.assert_allclose(planes_PNN[:, record.rank] * CALLS, logged, rtol=1e-6)
        assert compute_us_N[record.rank] * CALLS == pytest.approx(record.compute_us)
        assert calls_N[record.rank] == CALLS


def test_all_windows_together_are_total_time_over_total_calls(page_8):
    header, floats = get_packed(page_8, "api/windows/all")
    records = [r for window in range(6) for r in make_window(window, 8, 4)]
    expected_NN = np.zeros((8, 8))
    for record in records:
        expected_NN[record.rank] += record.dispatch_wait_us
    assert header["window"] is None and (header["t_start"], header["t_end"]) == (1_760_000_000, 1_760_000_060)
    np.testing.assert_allclose(floats[:64].reshape(8, 8), expected_NN / (6 * CALLS), rtol=1e-6)


def test_courses_of_ranks(page_8):
    records = make_window(4, 8, 4)
    wait_us_NN = np.array([np.array(r.dispatch_wait_us) + r.combine_wait_us for r in records]) / CALLS
    awaited_us_N, waits_us_N = wait_us_NN.sum(axis=0) / 7, wait_us_NN.sum(axis=1) / 7
    header, floats = get_packed(page_8, "api/timeline/awaited")
    assert header["first"] == header["last"] == list(range(6))
    np.testing.assert_allclose(floats.reshape(6, 8)[4], awaited_us_N, rtol=1e-6)
    late = get(page_8, f"api/ranks/{LATE_RANK}")
    assert set(late["series"]) == set(SERIES)
    assert late["series"]["waits"][4] == pytest.approx(waits_us_N[LATE_RANK], rel=1e-4)
    assert late["usual"]["awaited"][4] == pytest.approx(np.median(awaited_us_N), rel=1e-4)
    assert late["series"]["compute"] == [200, 200, 600, 600, 600, 600]


def test_experts_and_their_migration(page_8):
    before, after = (get(page_8, f"api/experts/{window}") for window in (0, "newest"))
    assert before["experts"]["epoch"] == 0 and after["experts"]["epoch"] == 1
    assert before["experts"]["layers"] == [1, 2] and before["experts"]["rank_of_slot"] == sorted([*range(8)] * SLOTS)
    assert before["experts"]["expert_of_slot"][0] == list(range(24)) and after["experts"]["expert_of_slot"][0][2] == 16
    assert before["experts"]["rows"][0] == [10 * e for e in range(24)]
    move = {"window": MIGRATED_WINDOW, "epoch": 1, "layer": 1, "rank": 0, "slot": 2, "before": 2, "after": 16}
    assert after["migrations"] == {"total": 1, "moves": [move]}


def test_many_ranks_are_sent_in_pieces(log_256):
    """What the page opens with is small; a window's matrices come when it is looked at."""
    with opened(log_256) as source:
        page = Page(source)
        assert len(page.reply("api/overview").body) < 20_000
        assert len(page.reply("api/windows/1").body) == pytest.approx(4 * (3 * 256**2 + 2 * 256), rel=0.001)
        assert len(page.reply("api/timeline/awaited").body) < 8_000


def test_a_page_of_one_rank(tmp_path):
    with opened(write_log(tmp_path, 1, 2, 1)) as source:
        assert get(Page(source), "api/overview")["windows"]["peak"] == [None, None]
        assert len(get_packed(Page(source), "api/windows/0")[1]) == 5


def test_the_event_is_the_state(page_8):
    event = page_8.event()
    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and page_8.event() == event
    assert json.loads(event.removeprefix(b"data: ")) == get(page_8, "api/state")


def test_its_files_are_read_at_the_start(page_8):
    html = page_8.reply("")
    assert html == page_8.reply("index.html") and html.status == 200 and b"<title>eprt diagnose</title>" in html.body
    assert page_8.reply("js/main.js").media_type == "text/javascript; charset=utf-8"


@pytest.mark.parametrize(
    "path",
    [
        "nothing",
        "../page.py",
        "js/",
        "api",
        "api/",
        "api/windows",
        "api/windows/99",
        "api/windows/-1",
        "api/windows/1e0",
        "api/windows/1234567890123456",
        "api/windows/\u0663",
        "api/ranks/8",
        "api/links/0",
        "api/links/0-8",
        "api/links/0-1-2",
        "api/timeline/__class__",
        "api/close/1",
        "api/state/1",
    ],
)
def test_what_is_not_its_own_is_not_found(page_8, path):
    reply = page_8.reply(path)
    assert reply.status == 404 and json.loads(reply.body)["error"]["message"].startswith("no such")
