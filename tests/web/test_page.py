"""The page in headless Chromium: its figures are the log's, mouse and keys work, nothing complains on the console."""

import json

import pytest
from eprt.diagnostics import WindowWriter, analyse
from eprt.diagnostics.page.log_source import LogSource

from tests.web.conftest import open_log, served, wait_until
from tests.web.logs import CALLS, LATE_RANK, make_window, write_log


def text(page, selector: str) -> str:
    return page.locator(selector).inner_text().replace("\u202f", " ")


def choose_window(page, index: int) -> None:
    page.locator("#slider").focus()
    page.keyboard.press("Home")
    for _ in range(index):
        page.keyboard.press("ArrowRight")
    page.wait_for_selector(f'#cells[data-window="{index}"]')


def shown_micros(value: float) -> str:
    """As format.js writes it: three digits."""
    if value >= 1e4:
        return f"{value / 1e3:.1f} ms"
    if value >= 100:
        return f"{value:,.0f} µs".replace(",", " ")
    return f"{value:.1f} µs" if value >= 10 else f"{value:.2f} µs"


def download(page, button: str):
    with page.expect_download() as waiting:
        page.click(button)
    return waiting.value


# ---- figures --------------------------------------------------------------------------------------------------------


def test_downloaded_figures_are_the_logs(open_page, server_8):
    page = open_page(server_8.url)
    for window in (0, 4):
        choose_window(page, window)
        file = download(page, "#json")
        assert file.suggested_filename == f"eprt-diagnose-wait-window-{window}.json"
        document = json.loads(file.path().read_text())
        for record in make_window(window, 8, 4):
            rank = record.rank
            assert document["dispatch_wait_us_per_call"][rank] == pytest.approx(
                [us / CALLS for us in record.dispatch_wait_us], rel=1e-6
            )
            assert document["combine_wait_us_per_call"][rank] == pytest.approx(
                [us / CALLS for us in record.combine_wait_us], rel=1e-6
            )
            assert document["recv_tokens_per_call"][rank] == [tokens / CALLS for tokens in record.recv_tokens]
            assert document["compute_us_per_call"][rank] == pytest.approx(record.compute_us / CALLS)
        assert document["window"] == window and document["num_calls"] == [CALLS] * 8


def test_a_cell_under_the_mouse_tells_the_logs_figures(open_page, server_8):
    page = open_page(server_8.url)
    choose_window(page, 3)
    for i, j in ((2, 6), (0, 1), (7, 5), (5, 0)):
        point_at(page, i, j, 8)
        record = make_window(3, 8, 4)[i]
        dispatch_us, combine_us = record.dispatch_wait_us[j] / CALLS, record.combine_wait_us[j] / CALLS
        tip = text(page, "#tooltip")
        for figure in (dispatch_us + combine_us, dispatch_us, combine_us):
            assert shown_micros(figure) in tip


# Where the tooltip names the cell: [x, y] in the canvas, or null.
FIND_CELL = """(cells, [row, cell, steps]) => {
    const box = cells.getBoundingClientRect();
    const tip = document.getElementById("tooltip");
    const names = (start, x, y) => {
        cells.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: box.x + x, clientY: box.y + y }));
        return !tip.hidden && tip.innerText.startsWith(start);
    };
    const at = size => Array.from({ length: steps }, (_, k) => size * (k + 0.5) / steps);
    const y = at(box.height).find(y => names(row, box.width / 2, y));
    return y === undefined ? null : [at(box.width).find(x => names(cell, x, y)), y];
}"""


def point_at(page, i: int, j: int, num_ranks: int, *, click: bool = False) -> dict[str, float]:
    """Moves the mouse over the canvas to where the tooltip names the cell; where that is, in the canvas."""
    cells, cell = page.locator("#cells"), f"Rank {i} waits for rank {j}\n"
    found = cells.evaluate(FIND_CELL, [f"Rank {i} waits", cell, 6 * num_ranks])
    assert found and found[0] is not None, f"no place on the canvas names {cell!r}"
    x, y = found
    page.mouse.move(0, 0)
    box = cells.bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)
    tip = page.locator("#tooltip")
    wait_until(lambda: tip.is_visible() and tip.inner_text().startswith(cell), "the tooltip of the cell")
    if click:
        page.mouse.down()
        page.mouse.up()
    return {"x": x, "y": y}


@pytest.mark.parametrize("dark", [True, False])
def test_the_colour_of_the_slow_link_stands_out(open_page, server_8, dark):
    """In the pixels themselves: farther from the page's ground than the cell beside it."""
    page = open_page(server_8.url, dark=dark)
    slow, usual = (lightness(page, point_at(page, 2, j, 8)) for j in (6, 7))
    ground = 16 if dark else 250
    assert abs(slow - ground) > abs(usual - ground) + 30, (slow, usual)


def lightness(page, point: dict[str, float]) -> float:
    """Of the brightest-to-darkest middle of a few pixels around a point, so that a figure's stroke does not count."""
    pixels = page.evaluate(
        """({x, y}) => {
            const cells = document.getElementById("cells");
            const copy = document.createElement("canvas");
            Object.assign(copy, {width: cells.width, height: cells.height});
            const pen = copy.getContext("2d", {willReadFrequently: true});
            pen.drawImage(cells, 0, 0);
            return Array.from(pen.getImageData(x - 4, y - 4, 9, 9).data);
        }""",
        point,
    )
    values = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in zip(pixels[::4], pixels[1::4], pixels[2::4]))
    return values[len(values) // 2]


# ---- findings -------------------------------------------------------------------------------------------------------


def test_findings_are_those_of_the_analysis(open_page, server_8, log_8):
    page = open_page(server_8.url)
    found = analyse(log_8).to_json()["findings"]
    items = page.locator("#finding-list li")
    assert items.count() == len(found) >= 2
    for k, finding in enumerate(found):
        item = items.nth(k).inner_text()
        who = f"Rank {finding['rank']}" if finding["kind"] != "point" else f"Link {finding['dst']} → {finding['src']}"
        assert who in item and f"{finding['ratio']:.2f}×" in item and finding["advice"][1:] in item


def test_a_click_on_a_finding_marks_it_and_goes_there(open_page, server_8):
    page = open_page(server_8.url)
    choose_window(page, 0)
    marks_before = page.locator("#marks").screenshot()
    page.locator("#finding-list button", has_text=f"Rank {LATE_RANK}").click()
    wait_until(lambda: "Window 5" in text(page, "#moment"), "a window in which it showed")
    wait_until(lambda: text(page, "#details h3") == f"Rank {LATE_RANK}", "its course")
    assert page.locator("#finding-list button[aria-pressed=true]").count() == 1
    page.wait_for_timeout(200)
    assert page.locator("#marks").screenshot() != marks_before
    page.keyboard.press("Escape")
    wait_until(lambda: page.locator("#finding-list button[aria-pressed=true]").count() == 0, "nothing chosen")


def test_a_click_on_a_cell_shows_the_link(open_page, server_8):
    page = open_page(server_8.url)
    point_at(page, 2, 6, 8, click=True)
    wait_until(lambda: text(page, "#details h3") == "Rank 2 waits for rank 6", "the details")
    records = [record for window in range(6) for record in make_window(window, 8, 4) if record.rank == 2]
    wait_us = sum(r.dispatch_wait_us[6] + r.combine_wait_us[6] for r in records) / (6 * CALLS)
    assert shown_micros(wait_us) in text(page, "#details .figures")
    assert page.locator("#details .chart").count() == 6, "two of the link, four of its rank"
    page.keyboard.press("]")
    wait_us = next(r.dispatch_wait_us[6] + r.combine_wait_us[6] for r in make_window(0, 8, 4) if r.rank == 2) / CALLS
    wait_until(lambda: shown_micros(wait_us) in text(page, "#details .chart >> nth=0"), "its course")
    page.click("#details .chips >> text=Rank 2")
    wait_until(
        lambda: page.locator("#details .chips button[aria-pressed=true]").inner_text() == "Rank 2", "the other's course"
    )


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_keys_go_everywhere(open_page, server_8):
    page = open_page(server_8.url)
    for key, title in (
        ("2", "Dispatch wait per call"),
        ("3", "Combine wait per call"),
        ("4", "Tokens per call"),
        ("1", "Wait per call"),
    ):
        page.keyboard.press(key)
        wait_until(lambda title=title: text(page, "#matrix-title") == title, title)
    page.keyboard.press("j")
    assert page.locator("#finding-list button").first.get_attribute("aria-pressed") == "true"
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert page.locator("#finding-list button").first.get_attribute("aria-pressed") == "true"
    page.keyboard.press("]")
    wait_until(lambda: text(page, "#moment").startswith("Window"), "a window")
    page.keyboard.press("a")
    wait_until(lambda: text(page, "#moment").startswith("6 windows"), "all windows")
    page.keyboard.press("u")
    assert page.locator("#scale [data-value=amount]").get_attribute("aria-checked") == "true"
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible() and "next finding" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()


def test_arrow_keys_read_the_matrix_out(open_page, server_8):
    page = open_page(server_8.url)
    choose_window(page, 1)
    page.keyboard.press("m")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):  # the first only shows where we are
        page.keyboard.press(key)
    record = make_window(1, 8, 4)[1]
    wait_us = (record.dispatch_wait_us[1] + record.combine_wait_us[1]) / CALLS
    assert text(page, "#readout") == "rank 1: a rank does not wait for itself" and wait_us == 0
    page.keyboard.press("ArrowRight")
    wait_us = (record.dispatch_wait_us[2] + record.combine_wait_us[2]) / CALLS
    assert text(page, "#readout").startswith(f"rank 1 waited {shown_micros(wait_us)} per call for rank 2, ")


def test_zoom_and_back(open_page, server_256):
    page = open_page(server_256.url)
    assert page.locator("#unzoom").is_hidden()
    page.keyboard.press("m")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("+")
    wait_until(lambda: page.locator("#unzoom").is_visible(), "the zoom")
    page.keyboard.press("0")
    wait_until(lambda: page.locator("#unzoom").is_hidden(), "the whole matrix")
    box = page.locator("#cells").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y + 60, steps=4)
    page.mouse.up()
    wait_until(lambda: page.locator("#unzoom").is_visible(), "the block")
    page.mouse.dblclick(x, y)
    wait_until(lambda: page.locator("#unzoom").is_hidden(), "the whole matrix again")


# ---- the rest -------------------------------------------------------------------------------------------------------


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
        page.locator("#finding-list button").nth(1).click()
        wait_until(lambda: page.locator("#cells").get_attribute("data-window") == "6", "where it showed last")
        point_at(page, 2, 6, 8)
        before = text(page, "#tooltip")
        page.keyboard.press("[")
        wait_until(lambda: text(page, "#tooltip") != before, "the tooltip tells of the window before")
        page.click("#problems summary")
        assert "started 2 times" in text(page, "#problems")
