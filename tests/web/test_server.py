"""What the page's server gives away and what it refuses; that its figures are the log's. No browser needed."""

import http.client
import json
from pathlib import Path

import numpy as np
import pytest
from eprt.diagnostics import WindowWriter, analyse
from eprt.diagnostics.page.log_source import LogSource
from eprt.diagnostics.page.page import Page
from eprt.diagnostics.page.server import PageServer
from eprt.diagnostics.windows.history import SERIES

from tests.web.conftest import open_log, served, wait_until
from tests.web.logs import CALLS, LATE_RANK, MIGRATED_WINDOW, SLOTS, make_window, write_log


def ask(server: PageServer, path: str, method: str = "GET", host: str | None = None, body: bytes | None = None):
    """The path goes out as it stands, dots and all."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    reply = connection.getresponse()
    reply.data = reply.read()  # type: ignore[attr-defined]
    connection.close()
    return reply


def get(server: PageServer, path: str):
    reply = ask(server, path)
    assert reply.status == 200, (path, reply.status)
    return json.loads(reply.data)


def get_packed(server: PageServer, path: str) -> tuple[dict, np.ndarray]:
    head, _, rest = ask(server, path).data.partition(b"\n")
    assert (len(head) + 1) % 4 == 0, "float32 arrays start at a multiple of four"
    return json.loads(head), np.frombuffer(rest, dtype="<f4")


# ---- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py",
        "/../../pyproject.toml",
        "/js/../../__main__.py",
        "/%2e%2e/server.py",
        "/..%2fserver.py",
        "/js/%2e%2e%2f%2e%2e%2fserver.py",
        "//etc/passwd",
        "/..\\server.py",
        "/js",
        "/js/",
        "/web/index.html",
        "/index.html/",
        "/base.css%00.png",
        "/api",
        "/api/",
        "/api/windows",
        "/api/windows/",
        "/api/windows/99",
        "/api/windows/-1",
        "/api/windows/1e0",
        "/api/windows/all/",
        "/api/ranks/8",
        "/api/ranks/x",
        "/api/timeline/__class__",
        "/api/close",
        "/api/lock",
    ],
)
def test_only_its_own_files_and_entries(server_8, path):
    reply = ask(server_8, path)
    assert reply.status == 404 and len(reply.data) < 100
    assert json.loads(reply.data)["error"].startswith("no such")


def test_nothing_but_reading(server_8):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        reply = ask(server_8, "/api/overview", method, body=b"{}")
        assert reply.status == 405 and reply.headers["allow"] == "GET, HEAD"
    head = ask(server_8, "/", "HEAD")
    assert head.status == 200 and head.data == b"" and int(head.headers["content-length"]) > 1000


def test_foreign_names_are_refused(log_8):
    """DNS rebinding: a name of somebody else's that leads to this machine."""
    with served(open_log(log_8), allowed_hosts=("Mine.example",)) as server:
        for host in ("evil.example", "evil.example:8321", "localhost.evil.example", "[", ""):
            assert ask(server, "/", host=host or " ").status == 403, host
        # Any port: an SSH forwarding has its own.
        for host in ("localhost", "localhost:9999", "127.0.0.1:1", "[::1]:80", "192.0.2.7:8321", "MINE.example:1"):
            assert ask(server, "/api/state", host=host).status == 200, host


def test_it_listens_on_this_machine_unless_told(log_8):
    with served(open_log(log_8)) as server:
        assert server.server_address[0] == "127.0.0.1" and server.url.startswith("http://127.0.0.1:")


def test_every_answer_carries_the_protecting_headers(server_8):
    for path in ("/", "/js/main.js", "/api/overview", "/nothing"):
        headers = ask(server_8, path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


# ---- its files ------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(server_8):
    html = ask(server_8, "/").data.decode()
    assert ask(server_8, "/index.html").data.decode() == html
    web = Path(__file__).parents[2] / "diagnostics" / "page" / "web"
    for path in sorted(p for p in web.rglob("*") if p.is_file()):
        reply = ask(server_8, f"/{path.relative_to(web)}")
        assert reply.status == 200 and reply.data == path.read_bytes(), path
        text = reply.data.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, f"{path} reaches out"
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text, f"{path} puts text in as markup"
    assert ask(server_8, "/js/main.js").headers["content-type"] == "text/javascript; charset=utf-8"


# ---- its figures ----------------------------------------------------------------------------------------------------


def test_overview(server_8, log_8):
    overview = get(server_8, "/api/overview")
    assert overview["schema"] == "eprt.page/1" and overview["name"] == str(log_8)
    assert overview["num_ranks"] == 8 and overview["node_of_rank"] == [0] * 4 + [1] * 4
    assert overview["windows"]["window"] == list(range(6)) and overview["windows"]["calls"] == [CALLS] * 6
    assert overview["windows"]["ranks"] == [8] * 6 and overview["progress"] == 1
    peaks = overview["windows"]["peak"]
    assert max(peaks[:2]) < 2.1 < min(peaks[2:]), "the late rank shows from window 2 on"
    assert overview["findings"] == analyse(log_8).to_json()
    assert overview["problems"] == {"count": 0, "first": []}


@pytest.mark.parametrize("window", range(6))
def test_a_window_is_the_logs_window(server_8, window):
    header, floats = get_packed(server_8, f"/api/windows/{window}")
    assert header["window"] == window and header["planes"] == ["dispatch", "combine", "tokens"]
    assert header["t_start"] == 1_760_000_000 + 10 * window
    planes_PNN, compute_us_N, calls_N = floats[:192].reshape(3, 8, 8), floats[192:200], floats[200:]
    for record in make_window(window, 8, 4):
        logged = (record.dispatch_wait_us, record.combine_wait_us, record.recv_tokens)
        np.testing.assert_allclose(planes_PNN[:, record.rank] * CALLS, logged, rtol=1e-6)
        assert compute_us_N[record.rank] * CALLS == pytest.approx(record.compute_us)
        assert calls_N[record.rank] == CALLS


def test_all_windows_together_are_total_time_over_total_calls(server_8):
    header, floats = get_packed(server_8, "/api/windows/all")
    records = [r for window in range(6) for r in make_window(window, 8, 4)]
    expected_NN = np.zeros((8, 8))
    for record in records:
        expected_NN[record.rank] += record.dispatch_wait_us
    assert header["window"] is None and (header["t_start"], header["t_end"]) == (1_760_000_000, 1_760_000_060)
    np.testing.assert_allclose(floats[:64].reshape(8, 8), expected_NN / (6 * CALLS), rtol=1e-6)


def test_courses_of_ranks(server_8):
    records = make_window(4, 8, 4)
    wait_us_NN = np.array([np.array(r.dispatch_wait_us) + r.combine_wait_us for r in records]) / CALLS
    awaited_us_N, waits_us_N = wait_us_NN.sum(axis=0) / 7, wait_us_NN.sum(axis=1) / 7
    header, floats = get_packed(server_8, "/api/timeline/awaited")
    assert header["first"] == header["last"] == list(range(6))
    np.testing.assert_allclose(floats.reshape(6, 8)[4], awaited_us_N, rtol=1e-6)
    late = get(server_8, f"/api/ranks/{LATE_RANK}")
    assert set(late["series"]) == set(SERIES)
    assert late["series"]["waits"][4] == pytest.approx(waits_us_N[LATE_RANK], rel=1e-4)
    assert late["usual"]["awaited"][4] == pytest.approx(np.median(awaited_us_N), rel=1e-4)
    assert late["series"]["compute"] == [200, 200, 600, 600, 600, 600]


def test_experts_and_their_migration(server_8):
    before, after = (get(server_8, f"/api/experts/{window}") for window in (0, "newest"))
    assert before["experts"]["epoch"] == 0 and after["experts"]["epoch"] == 1
    assert before["experts"]["layers"] == [1, 2] and before["experts"]["rank_of_slot"] == sorted([*range(8)] * SLOTS)
    assert before["experts"]["expert_of_slot"][0] == list(range(24)) and after["experts"]["expert_of_slot"][0][2] == 16
    assert before["experts"]["rows"][0] == [10 * e for e in range(24)]
    move = {"window": MIGRATED_WINDOW, "epoch": 1, "layer": 1, "rank": 0, "slot": 2, "before": 2, "after": 16}
    assert after["migrations"] == {"total": 1, "moves": [move]}


def test_many_ranks_are_sent_in_pieces(server_256):
    """What the page opens with is small; a window's matrices come when it is looked at."""
    assert len(ask(server_256, "/api/overview").data) < 20_000
    assert len(ask(server_256, "/api/windows/1").data) == pytest.approx(4 * (3 * 256**2 + 2 * 256), rel=0.001)
    assert len(ask(server_256, "/api/timeline/awaited").data) < 8_000


# ---- experts that the log does not tell of --------------------------------------------------------------------------


def test_experts_not_recorded(tmp_path):
    with served(open_log(write_log(tmp_path, 4, 2, 4, experts=False))) as server:
        document = get(server, "/api/experts/newest")
        assert document["experts"] is None and document["notes"] == ["expert load and placement: not recorded"]


# ---- a log that grows -----------------------------------------------------------------------------------------------


def test_events_tell_of_new_windows(tmp_path):
    write_log(tmp_path, 4, 2, 4)
    with served(open_log(tmp_path)) as server:
        connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
        connection.request("GET", "/api/events")
        stream = connection.getresponse()
        assert stream.headers["content-type"] == "text/event-stream"
        first = json.loads(stream.readline().removeprefix(b"data: "))
        assert first["windows"] == 2
        for record in make_window(2, 4, 4):
            WindowWriter(tmp_path).write(record)
        while True:
            line = stream.readline()
            if line.startswith(b"data: ") and json.loads(line.removeprefix(b"data: "))["windows"] == 3:
                break
        wait_until(lambda: get(server, "/api/overview")["findings"]["windows"] == 3, "a new analysis")
        assert get_packed(server, "/api/windows/2")[0]["window"] == 2
        connection.close()


def test_the_line_of_a_late_rank_is_added_to_its_window(tmp_path):
    *in_time, late = make_window(0, 4, 4)
    for record in in_time:
        WindowWriter(tmp_path).write(record)
    source = open_log(tmp_path)
    try:
        assert source.overview()["windows"]["ranks"] == [3]
        assert np.isnan(source.window(0).planes_PNN[0, 3]).all(), "no data, not zero"
        WindowWriter(tmp_path).write(late)
        wait_until(lambda: source.overview()["windows"]["ranks"] == [4], "the late line")
        expected = np.array(late.dispatch_wait_us) / CALLS
        np.testing.assert_allclose(source.window(0).planes_PNN[0, 3], expected)
        np.testing.assert_allclose(source.window(None).planes_PNN[0, 3], expected)
    finally:
        source.close()


def test_rotation_while_somebody_looks(tmp_path):
    size = len(make_window(0, 2, 2)[0].to_line())
    writer = WindowWriter(tmp_path, max_bytes=3 * size)
    for window in range(3):
        for record in make_window(window, 2, 2):
            writer.write(record)
    source = open_log(tmp_path)
    try:
        for window in range(3, 6):
            for record in make_window(window, 2, 2):
                writer.write(record)
        wait_until(lambda: 5 in source.overview()["windows"]["window"], "the windows after the rotation")
        assert (tmp_path / "diagnose_rank0.log.1").exists()
        assert source.window(1).planes_PNN[0, 0, 1] == pytest.approx(
            make_window(1, 2, 2)[0].dispatch_wait_us[1] / CALLS
        )
    finally:
        source.close()


def test_broken_lines_are_told(tmp_path):
    write_log(tmp_path, 4, 2, 4)
    with (tmp_path / "diagnose_rank1.log").open("a") as file:
        file.write("{not json\n")
    source = open_log(tmp_path)
    try:
        problems = source.overview()["problems"]
        assert problems["count"] == 1 and "diagnose_rank1.log:3" in problems["first"][0]
    finally:
        source.close()


def test_unreadable_directories_are_refused_with_the_reason(tmp_path):
    with pytest.raises(OSError, match="missing"):
        LogSource(tmp_path / "missing")
    with pytest.raises(ValueError, match="holds no diagnose_rank"):
        LogSource(tmp_path)
    (tmp_path / "diagnose_rank0.log").write_text("garbage\n")
    with pytest.raises(ValueError, match=r"diagnose_rank0.log:1"):
        LogSource(tmp_path)


def test_a_page_of_one_rank(tmp_path):
    with served(open_log(write_log(tmp_path, 1, 2, 1))) as server:
        assert get(server, "/api/overview")["windows"]["peak"] == [None, None]
        assert len(get_packed(server, "/api/windows/0")[1]) == 5


def test_a_long_run_is_drawn_in_fewer_columns(tmp_path):
    source = open_log(write_log(tmp_path, 2, 1, 2, experts=False))
    try:
        for window in range(1, 1500):
            for record in make_window(window % 6, 2, 2, experts=False)[:2]:
                source.history.add_record(type(record)(**{**record.__dict__, "window": window}))
        line = source.history.timeline("awaited")
        assert len(line.first_C) == 500 and (line.first_C[1], line.last_C[1], line.last_C[-1]) == (3, 5, 1499)
    finally:
        source.close()


def test_the_page_can_be_made_without_a_server(log_8):
    source = open_log(log_8)
    try:
        assert Page(source).reply("api/state").status == 200
        assert Page(source).event().startswith(b"data: {")
    finally:
        source.close()
