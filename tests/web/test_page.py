"""The page in headless Chromium: themes, many ranks, live logs, broken logs; nothing complains on the console."""

import pytest
from eprt.diagnostics import WindowWriter
from eprt.diagnostics.mutes import with_mutes
from eprt.diagnostics.page.kept_source import KeptSource
from eprt.diagnostics.page.log_source import LogSource

from eprt.serve.tiers.metrics import OUTCOMES
from tests.web.actions import choose_window, download, point_at, text
from tests.web.conftest import open_log, served, wait_until
from tests.web.logs import make_window, write_log


@pytest.mark.parametrize("dark", [True, False])
def test_the_theme_follows_the_system_until_somebody_chooses(open_page, server_8, dark):
    page = open_page(server_8.url, dark=dark)
    theme = page.locator("html").get_attribute("data-theme")
    assert theme == ("dark" if dark else "light")
    page.keyboard.press("t")
    assert page.locator("html").get_attribute("data-theme") != theme
    page.reload()
    page.wait_for_selector("#verdict:not(:empty)")
    assert page.locator("html").get_attribute("data-theme") != theme, "remembered"


def test_many_ranks_are_there_at_once_and_whole(open_page, server_256):
    page = open_page(server_256.url)
    assert text(page, "#status") == "256 ranks on 32 nodes"
    assert "Link 6 → 2 is slow" in text(page, "#finding-list")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    choose_window(page, 2)
    wait_until(lambda: any(url.endswith("api/windows/2") for url in requests), "a window on demand")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
    fits = """() => {
      const moment = document.querySelector("#moment");
      moment.querySelector("small").textContent = "28 Nov 2026, 20:08:00 – 20:08:08";
      return moment.scrollWidth <= moment.clientWidth;
    }"""
    assert page.evaluate(fits), "the longest time has room at the foot"
    heights = "[...document.querySelectorAll('#details .figures dt')].map(line => line.offsetHeight)"
    assert max(page.evaluate(heights)) < 30, "each figure is one line"


def test_the_picture(open_page, server_8):
    page = open_page(server_8.url)
    file = download(page, "#png")
    data = file.path().read_bytes()
    assert file.suggested_filename == "eprt-diagnose-wait-all-windows.png"
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


def test_ranks_over_time_lead_to_their_window(open_page, server_8):
    page = open_page(server_8.url)
    canvas = page.locator("#timeline")
    canvas.scroll_into_view_if_needed()
    page.mouse.wheel(0, 400)
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 0.99, "y": box["height"] * 0.01})
    wait_until(lambda: "Window 5" in text(page, "#moment"), "the last window")
    wait_until(lambda: text(page, "#details h3") == "Rank 0", "its course")
    for series in ("Waits", "Compute", "Tokens"):
        page.click(f"#series >> text={series}")
    assert page.locator("#series [data-value=tokens]").get_attribute("aria-checked") == "true"


MARKED = """canvas => {
    const copy = Object.assign(document.createElement("canvas"), { width: canvas.width + 1, height: canvas.height });
    const pen = copy.getContext("2d", { willReadFrequently: true });
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--mark").trim();
    pen.fillRect(canvas.width, 0, 1, 1);
    const [mark] = new Uint32Array(pen.getImageData(canvas.width, 0, 1, 1).data.buffer);
    pen.drawImage(canvas, 0, 0);
    const pixels = new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    return pixels.filter(pixel => pixel === mark).length;
}"""  # pixels of the colour of marks


def test_a_migration_is_listed_and_leads_to_its_window(open_page, server_8):
    page = open_page(server_8.url)
    row = page.locator(".moves tbody tr")
    assert row.count() == 1 and row.inner_text().split() == ["3", "1", "0", "/", "2", "2", "→", "16"]
    row.click()
    wait_until(lambda: "Window 3" in text(page, "#moment"), "the window of the migration")
    wait_until(lambda: "placement epoch 1" in text(page, "#experts-hint"), "its placement")
    placement = page.locator("#placement")
    framed = wait_until(lambda: (n := placement.evaluate(MARKED)) > 150 and n, "a frame, not a corner")
    assert isinstance(framed, int)
    placement.hover(position={"x": 36 + 2.5 * 52, "y": 11})  # rank 0, slot 2
    assert "since window 3, expert 2 before" in " ".join(text(page, "#tooltip").split())
    page.keyboard.press("]")
    wait_until(lambda: 0 < placement.evaluate(MARKED) < framed / 2, "a corner instead of the frame")
    page.keyboard.press("{")
    wait_until(lambda: placement.evaluate(MARKED) == 0, "nothing had moved yet")
    page.click("#expert-order >> text=By load")
    assert page.locator("#expert-load").is_visible() and page.locator("#placement").is_visible()


def test_what_is_not_recorded_is_said(open_page, tmp_path):
    with served(open_log(write_log(tmp_path, 4, 2, 4, experts=False))) as server:
        page = open_page(server.url)
        assert text(page, "#experts-body") == "expert load and placement: not recorded"


def test_live_windows_appear_by_themselves(open_page, tmp_path):
    write_log(tmp_path, 8, 3, 4)
    with served(open_log(tmp_path)) as server:
        page = open_page(server.url)
        wait_until(lambda: "Window 2" in text(page, "#moment"), "a log still written to is followed")
        assert page.locator("#follow").get_attribute("aria-pressed") == "true"
        for window in (3, 4):
            for record in make_window(window, 8, 4):
                WindowWriter(tmp_path).write(record)
            wait_until(lambda window=window: f"Window {window}" in text(page, "#moment"), f"window {window}")
        choose_window(page, 1)
        assert page.locator("#follow").get_attribute("aria-pressed") == "false", "who looks back is left alone"
        for record in make_window(5, 8, 4):
            WindowWriter(tmp_path).write(record)
        wait_until(lambda: page.locator("#slider").get_attribute("max") == "5", "the new window")
        assert "Window 1" in text(page, "#moment")
        page.keyboard.press("l")
        wait_until(lambda: "Window 5" in text(page, "#moment"), "the newest")


def test_text_from_a_log_is_never_markup(open_page, tmp_path):
    directory = tmp_path / "<img src=x onerror=alert(1)>"
    write_log(directory, 4, 2, 4)
    with (directory / "diagnose_rank1.log").open("a") as file:
        file.write('{"schema": "<script>alert(2)</script>", "window": 1}\n')
    with served(open_log(directory)) as server:
        page = open_page(server.url)
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        assert "<img src=x" in text(page, "#source")
        page.click("#problems summary")
        assert "<script>alert(2)" in text(page, "#problems")
        assert page.locator("img, #problems script").count() == 0


def test_broken_and_missing_ranks_leave_a_readable_page(open_page, tmp_path):
    write_log(tmp_path, 8, 3, 4)
    (tmp_path / "diagnose_rank3.log").unlink()
    with served(LogSource(tmp_path)) as server:
        page = open_page(server.url)
        wait_until(lambda: page.locator("#problems").is_visible(), "the remark")
        page.click("#problems summary")
        assert "nothing from rank 3" in text(page, "#problems")
        page.keyboard.press("m")
        for _ in range(4):
            page.keyboard.press("ArrowDown")
        assert "rank 3 waited no data per call for rank 0" in text(page, "#readout")


def test_a_lost_server_is_said(browser, log_8):
    """What the console says is the browser's own here: it tells of every refused connection."""
    context = browser.new_context()
    try:
        with served(open_log(log_8)) as server:
            page = context.new_page()
            page.goto(server.url)
            page.wait_for_selector("#finding-list li")
            assert page.locator("#banner").is_hidden()
        wait_until(lambda: page.locator("#banner").is_visible(), "the banner")
        assert "lost its server" in text(page, "#banner") and page.locator("#finding-list li").count() >= 2
    finally:
        context.close()


def test_runs_and_joined_windows_are_named(open_page, tmp_path, monkeypatch):
    """A job started again in its directory, and so many windows that they share places on the bar."""
    monkeypatch.setattr("eprt.diagnostics.page.log_source.most_rows", lambda num_ranks: 4)
    later_s = 1e4
    write_log(tmp_path, 8, 3, 4)
    for window in range(8):
        for record in make_window(window, 8, 4):
            times = {"t_start": record.t_start + later_s, "t_end": record.t_end + later_s}
            WindowWriter(tmp_path).write(type(record)(**{**record.__dict__, **times}))
    with served(open_log(tmp_path)) as server:
        page = open_page(server.url)
        assert "run 2 of 2" in text(page, "#status")
        if not text(page, "#moment").startswith("8 windows"):
            page.keyboard.press("a")  # the page follows a log that was written just now
        wait_until(lambda: text(page, "#moment").startswith("8 windows"), "all windows")
        page.keyboard.press("[")
        wait_until(lambda: text(page, "#moment").startswith("Windows 6–7 · 1 000 calls"), "two windows in one place")
        page.locator("#finding-list [data-finding='1']").click()
        wait_until(lambda: page.locator("#cells").get_attribute("data-window") == "6", "where it showed last")
        point_at(page, 2, 6, 8)
        before = text(page, "#tooltip")
        page.keyboard.press("[")
        wait_until(lambda: text(page, "#tooltip") != before, "the tooltip tells of the window before")
        page.click("#problems summary")
        assert "started 2 times" in text(page, "#problems")


INSTANCES = {
    "schema": "eprt.instances/1",
    "instances": [
        {
            "name": name,
            "role": name.split("-")[0],
            "state": state,
            "since_s": 0,
            "ranks": [{"rank": rank, "pid": 1, "host": "h"} for rank in ranks],
            "sequences": 5,
            "tokens": 1000,
            "running": 4,
            "waiting": 1,
            "held": 2,
            "arriving": 3,
            "kv_pages": 1000,
            "kv_pages_used": 250,
            "prefill_tokens_per_s": 4000.0,
            "predicted_step_s": {"step": 0.01, "row": 0.001, "token": 0.000001},
        }
        for name, state, ranks in (
            ("prefill-0", "ready", (0, 1)),
            ("decode-0", "ready", (2,)),
            ("decode-1", "lost", (3,)),
        )
    ],
    "instances_lost": 1,
    "starting": [{"role": "decode", "name": "decode-2", "ranks": 2}],
    "scale": {
        "mode": "advise",
        "roles": {"prefill": {"least": 1, "most": 3, "wanted": 2, "why": "first tokens in 2.1 s, above 1 s"}},
    },
    "handoffs": {
        "under_way": 2,
        "oldest": [{"request": "7", "from": "prefill-0", "to": "decode-0", "pages": 9, "bytes": 73728, "age_s": 0.25}],
        "num_done": 10,
        "num_pulled": 30,
        "num_shared": 10,
        "num_failed": 1,
        "num_late": 0,
        "num_replayed": 2,
        "wait_s": 0.5,
    },
    "tiers": [
        {
            "name": "max",
            "ttft_s": 1.0,
            "itl_s": 0.03,
            "sequences": 3,
            "requests": dict.fromkeys(OUTCOMES, 0) | {"met": 9, "slow_tokens": 1, "aborted": 5},
            "tokens": dict.fromkeys(OUTCOMES, 0) | {"met": 900},
        }
    ],
}


# Of the lamp: its corners, and whether it is filled.
LAMP = """button => {
  const { borderTopLeftRadius, backgroundColor } = getComputedStyle(button, "::before");
  return [borderTopLeftRadius, backgroundColor !== "rgba(0, 0, 0, 0)"];
}"""


def hanging(rank: int) -> dict:
    """A finding that lasts, as a server tells of it."""
    fields = {"kind": "hang", "rank": rank, "src": None, "dst": None, "cause": "stopped", "nodes": [], "tier": None}
    times = {"first_window": 2, "last_window": 5, "t_start": 1_760_000_020.0, "t_end": None, "active": True}
    words = {"evidence": "rank 5 has given no heartbeat for 9 s", "advice": "on h: kill -CONT 77 lets it go on"}
    cost = {"lost": 1.0, "us_per_call": None, "step_ms": None}
    return {"score": 9.0, "ratio": 0.0, "confidence": 0.999, **fields, **times, **words, "cost": cost}


def test_a_server_shows_what_hangs_its_instances_and_its_tiers(open_page, monkeypatch):
    monkeypatch.setattr(KeptSource, "instances", lambda source: INSTANCES)
    source = KeptSource("a server", 8, 100)
    source.add_records([record for window in range(6) for record in make_window(window, 8, 4)])
    path = {**hanging(5), "kind": "path", "rank": None, "nodes": [0, 1], "cause": "comm", "ratio": 4.0, "cost": None}
    path["evidence"] = "links between nodes 0 and 1 are 4x their usual"
    told = {"schema": "eprt.findings/1", "num_ranks": 8, "windows": 6}
    slots = [{"rank": 0, "state": "ready", "since_s": 1.7e9}, {"rank": 2, "state": "gone", "since_s": 1.7e9}]
    slots_told = {"view": 3, "ranks": slots}
    source.set_findings({**told, "findings": with_mutes([hanging(5), path], []), "slots": slots_told})
    with served(source) as server:
        page = open_page(server.url)
        assert " · view 3: rank 2 gone since " in text(page, "#status") and "rank 0" not in text(page, "#status")
        assert "Rank 5 hangs" in text(page, "#banner") and "kill -CONT 77" in text(page, "#banner")
        assert "newest window" in text(page, "#age")
        assert page.locator("#follow").evaluate(LAMP) == ["0px", True], "a square, in which green and red are one"
        first = page.locator("#finding-list li").first.inner_text()
        assert "costs everything" in first and "The path between nodes 0 and 1" in text(page, "#finding-list")
        marked = wait_until(lambda: page.locator("#marks").evaluate(MARKED), "the marks of both")
        page.keyboard.press("j")
        wait_until(lambda: page.locator("#marks").evaluate(MARKED) > marked, "the hang's column, chosen")
        legend, foot = (page.locator(name).bounding_box() for name in ("#legend", "footer"))
        assert legend["y"] + legend["height"] <= foot["y"], "the banner takes nothing off the first screen"
        cards = page.locator(".instance").all_inner_texts()
        for card, words in zip(
            cards, (("prefill-0", "ready", "ranks 0–1", "held"), ("decode-0", "15 ms", "250 of"), ("decode-1", "lost"))
        ):
            assert all(word in card.replace("\u202f", " ") for word in words), (card, words)
        on_the_way = text(page, "#on-their-way")
        for words in (
            "2 requests on their way",
            "9 pages, 72 KiB",
            "250 ms",
            "50 ms each",
            "25 % were there",
            "1 younger",
        ):
            assert words in on_the_way, words
        assert "decode-2 is being started with 2 ranks" in text(page, "#instances-body")
        assert "2 wanted of 1 to 3: first tokens in 2.1 s" in text(page, "#instances-body")
        assert "90 % of 10" in text(page, "[data-tier=max]") and "1 slow tokens" in text(page, "[data-tier=max]")
