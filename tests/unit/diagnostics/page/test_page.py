"""The page's answers: its figures are the log's, and nothing is answered that is not its own."""

import json

import numpy as np
import pytest
from eprt.diagnostics import analyse
from eprt.diagnostics.__main__ import main
from eprt.diagnostics.mutes import FILE_NAME, MuteFile, with_mutes
from eprt.diagnostics.page.page import Page
from eprt.diagnostics.windows.baseline import Baseline
from eprt.diagnostics.windows.history import SERIES

from tests.unit.diagnostics.page.cases import opened
from tests.web.conftest import wait_until
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
    assert overview["findings"] == {**told, "findings": with_mutes(told["findings"], [])}
    assert overview["windows"]["step_ms"] == [9, 9, 16, 16, 16, 16]
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
        "api/mutes",
        "api/usual/1",
        "api/state/1",
    ],
)
def test_what_is_not_its_own_is_not_found(page_8, path):
    reply = page_8.reply(path)
    assert reply.status == 404 and json.loads(reply.body)["error"]["message"].startswith("no such")


# ---- what was usual before ------------------------------------------------------------------------------------------


def test_what_was_usual_is_the_runs_own_past(page_8):
    """The late rank is younger than the run; the slow link is as old, so it is usual."""
    header, floats = get_packed(page_8, "api/usual")
    assert header["source"] == "the median of the 2 of 6 windows that no finding covers"
    before_us_NN = np.median(
        [[np.array(r.dispatch_wait_us) / CALLS for r in make_window(window, 8, 4)] for window in (0, 1)], axis=0
    )
    np.testing.assert_allclose(floats[:64].reshape(8, 8), before_us_NN, rtol=1e-5)
    assert floats[192:200].tolist() == [200] * 8, "nobody computed long"
    assert floats[200:208] == pytest.approx(np.full(8, 8 * 16), rel=0.2)


def test_or_the_saved_baselines(log_8, tmp_path):
    file = tmp_path / "usual.npz"
    Baseline.from_matrices(analyse(log_8, windows=(2, 5)).matrices).save(file)
    with opened(log_8, baseline=file) as source:
        header, floats = get_packed(Page(source), "api/usual")
    assert header["source"] == "the saved baseline"
    assert floats[192 + LATE_RANK] == 600 and np.isnan(floats[128:192]).all(), "it has no tokens of single links"


# ---- mutes ----------------------------------------------------------------------------------------------------------


def change(page: Page, **fields) -> tuple[int, dict]:
    reply = page.change_mutes(json.dumps(fields).encode())
    return reply.status, json.loads(reply.body)


def test_a_mute_is_that_of_the_file_and_of_the_command(tmp_path):
    with opened(write_log(tmp_path, 8, 6, 4)) as source:
        page = Page(source)
        assert get(page, "api/overview")["muting"] == {"refusal": "", "asks_for_key": False}
        status, told = change(page, place="column:5", until="12h", note=" on order ")
        assert (status, told["place"], told["changed"]) == (200, "column:5", True)
        (mute,) = MuteFile(tmp_path / FILE_NAME).read(0)
        assert (mute.place, mute.until, mute.note) == ("column:5", told["muted_until"], "on order")
        first, last = get(page, "api/overview")["findings"]["findings"]
        assert (first["place"], first["muted_until"]) == ("point:2-6", None), "muted ones are last"
        assert (last["place"], last["muted_until"], last["mute_note"]) == ("column:5", mute.until, "on order")
        assert change(page, place="column:5", until=None) == (
            200,
            {"place": "column:5", "muted_until": None, "changed": True},
        )
        assert not change(page, place="column:5", until=None)[1]["changed"]
        assert [f["place"] for f in get(page, "api/overview")["findings"]["findings"]] == ["column:5", "point:2-6"]


def test_a_mute_of_the_command_is_seen_while_the_page_is_open(tmp_path):
    with opened(write_log(tmp_path, 8, 6, 4)) as source:
        before = source.state()["version"]
        assert main([str(tmp_path), "--mute", "column:5", "--until", "1h"]) == 0
        wait_until(lambda: source.state()["version"] != before, "a newer version")
        assert source.overview()["findings"]["findings"][-1]["muted_until"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "not JSON"),
        (b"[]", "an object with place and until"),
        (b'{"place": "column:5"}', "an object with place and until"),
        (b'{"place": 5, "until": null}', "an object with place and until"),
        (b'{"place": "rank:5", "until": "12h"}', "must be column:RANK"),
        (b'{"place": "column:99", "until": "12h"}', "there is no rank 99; the job has ranks 0 to 7"),
        (b'{"place": "column:5", "until": 12}', "until=12: must be a string"),
        (b'{"place": "column:5", "until": "yesterday"}', "must be a date"),
        (b'{"place": "column:5", "until": "2020-01-01"}', "is over already"),
        (b'{"place": "column:5", "until": "0h"}', "must be at least 1h"),
        (b'{"place": "column:5", "until": "99999999999999d"}', "must be at least 1d"),
        (b'{"place": "column:5", "until": "1h", "note": 7}', "note: must be a string"),
        (b'{"place": "tier:' + b"x" * 300 + b'", "until": "1h"}', "more than 200"),
    ],
)
def test_another_change_is_refused_by_name(page_8, body, why):
    reply = page_8.change_mutes(body)
    assert reply.status == 400 and why in json.loads(reply.body)["error"]["message"]


def test_a_log_that_cannot_be_written_says_so(log_8, monkeypatch):
    with opened(log_8) as source:
        monkeypatch.setattr("eprt.diagnostics.mutes.os.access", lambda path, mode: False)
        page = Page(source)
        why = f"{log_8} cannot be written by this process"
        assert get(page, "api/overview")["muting"]["refusal"] == why
        status, told = change(page, place="column:5", until="12h")
        assert (status, told["error"]["code"], told["error"]["message"]) == (403, "read_only", why)
    assert not (log_8 / FILE_NAME).exists()
