"""The matrix and the findings in headless Chromium: figures are the log's, mouse and keys work."""

import json

import pytest
from eprt.diagnostics import analyse

from tests.web.actions import choose_window, download, point_at, shown_micros, text
from tests.web.conftest import wait_until
from tests.web.logs import CALLS, LATE_RANK, make_window

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
    assert page.locator("#scale [data-value=then]").get_attribute("aria-checked") == "true"
    page.keyboard.press("u")
    assert page.locator("#scale [data-value=amount]").get_attribute("aria-checked") == "true"
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible() and "next finding" in page.locator("#keys").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()


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
