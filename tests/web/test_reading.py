"""The page in headless Chromium: on a phone, by finger, in grey, with any colour vision, as a picture."""

import base64
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from eprt.diagnostics.mutes import mutes_beside

from tests.web.actions import choose_window, download, point_at, text
from tests.web.conftest import open_log, served, wait_until
from tests.web.logs import write_log

DEFICIENCIES = ("none", "achromatopsia", "protanopia", "deuteranopia", "tritanopia")
LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3
LEAST_TARGET = 44  # CSS pixels; 2.5.5

# Elements that a finger is to hit and that are smaller than they should be.
SMALL_TARGETS = """least => [...document.querySelectorAll("button, select, summary, input, textarea, .moves tbody tr")]
    .filter(node => node.checkVisibility({visibilityProperty: true}))
    .map(node => [node, node.getBoundingClientRect()])
    .filter(([node, box]) => box.width < least - 0.01 || box.height < least - 0.01)
    .map(([node, box]) => `${node.id || node.textContent}: ${box.width} x ${box.height}`)"""

# Words that their box cuts, and boxes that stick out.
CUT = """() => [...document.querySelectorAll("body *")]
    .filter(node => node.checkVisibility({visibilityProperty: true}) && !node.closest(".unseen, .skip, svg, option"))
    .filter(node => {
        const box = node.getBoundingClientRect();
        const hides = getComputedStyle(node).overflowX !== "visible";
        const isBox = node.matches("input, select, textarea");
        const sticksOut = box.right > innerWidth + 0.5 || box.left < -0.5;
        return sticksOut || (hides && !isBox && node.scrollWidth > node.clientWidth + 1);
    })
    .map(node => `${node.tagName} ${node.id} ${node.className}: ${node.textContent.slice(0, 40)}`)"""

# Text whose contrast against what is behind it is too low: [contrast, text].
FAINT = """least => {
    const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const bytes = (...colours) => {
        pen.clearRect(0, 0, 1, 1);
        for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const luminance = rgb => {
        const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const grounds = node => node ? [...grounds(node.parentElement), getComputedStyle(node).backgroundColor] : [];
    const out = [];
    for (const node of document.querySelectorAll("body *")) {
        const own = [...node.childNodes].filter(child => child.nodeType === 3 && child.data.trim()).length;
        if (!own || !node.checkVisibility({visibilityProperty: true})) continue;
        if (node.closest(".skip, .unseen, option")) continue;
        const back = grounds(node);
        const [a, b] = [luminance(bytes(...back, getComputedStyle(node).color)), luminance(bytes(...back))];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < least) out.push([contrast, node.textContent.slice(0, 40)]);
    }
    return out;
}"""

# Relative luminance of the legend's colours from left to right, out of a screenshot.
LEGEND = """async ([png, ratio]) => {
    const bytes = Uint8Array.from(atob(png), sign => sign.charCodeAt(0));
    const image = await createImageBitmap(new Blob([bytes], {type: "image/png"}));
    const pen = new OffscreenCanvas(image.width, image.height).getContext("2d", {willReadFrequently: true});
    pen.drawImage(image, 0, 0);
    const bar = Math.min(320, image.width / ratio - 48) * ratio;
    const left = (image.width - bar) / 2;
    const out = [];
    for (let k = 0; k < 64; k++) {
        const [r, g, b] = [...pen.getImageData(Math.round(left + (k + 0.5) * bar / 64), 6 * ratio, 1, 1).data]
            .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        out.push(0.2126 * r + 0.7152 * g + 0.0722 * b);
    }
    return out;
}"""

# Lines of text that the button beside them covers.
COVERED = """() => [...document.querySelectorAll("#finding-list .mute")].flatMap(mute => {
  const over = mute.getBoundingClientRect();
  return [...mute.closest("li, div").querySelectorAll(".finding-title, .finding-facts")].flatMap(text => {
    const range = document.createRange();
    range.selectNodeContents(text);
    const hit = [...range.getClientRects()].some(line =>
      line.right > over.left && line.left < over.right && line.bottom > over.top && line.top < over.bottom);
    return hit ? [text.textContent] : [];
  });
})"""


@pytest.mark.parametrize(("width", "dark"), [(390, False), (768, True)])
def test_fingers_and_small_screens(browser, server_8, width, dark):
    context = browser.new_context(
        viewport={"width": width, "height": 844},
        color_scheme="dark" if dark else "light",
        has_touch=True,
        is_mobile=True,
    )
    try:
        page = context.new_page()
        page.goto(server_8.url)
        page.wait_for_selector(".moves tbody tr")
        name = page.locator("#finding-list .finding-title").first.bounding_box()
        assert name["y"] + name["height"] < page.locator("footer").bounding_box()["y"], "who is at fault comes first"
        page.evaluate(
            "document.querySelector('#finding-list .finding-facts').prepend('holds all up, stopped · still · ')"
        )
        for opened in ("#source", "#finding-list button", "#finding-list .mute"):
            if opened != "#source":
                page.locator(opened).first.tap()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(CUT) == [] and page.evaluate(SMALL_TARGETS, LEAST_TARGET) == []
            assert page.evaluate(FAINT, LEAST_CONTRAST) == [] and page.evaluate(COVERED) == []
        page.locator("#mute button", has_text="Cancel").tap()
        page.locator("#pick-row").select_option("2")
        page.locator("#pick-column").select_option("6")
        wait_until(lambda: text(page, "#details h3") == "Rank 2 waits for rank 6", "what a cell would have shown")
        page.locator("#expert-layer").select_option("1")
        wait_until(lambda: "layer 2" in text(page, "#experts-hint"), "the other layer")
    finally:
        context.close()


@pytest.mark.parametrize("dark", [True, False])
def test_the_scales_read_in_grey_and_with_any_colour_vision(open_page, server_8, dark):
    """Luminance goes one way along each scale, and a step of twice as long is a step that is seen."""
    page = open_page(server_8.url, dark=dark)
    session = page.context.new_cdp_session(page)
    for scale in ("ratio", "amount"):
        page.click(f"#scale [data-value={scale}]")
        page.wait_for_selector(f"#scale [data-value={scale}][aria-checked=true]")
        for kind in DEFICIENCIES:
            session.send("Emulation.setEmulatedVisionDeficiency", {"type": kind})
            png = base64.b64encode(page.locator("#legend").screenshot()).decode()
            light = page.evaluate(LEGEND, [png, 1])
            light = light if dark else light[::-1]
            assert all(b > a - 0.002 for a, b in pairwise(light)), (scale, kind)
            eighths = [light[k] + 0.05 for k in range(0, 64, 15)]  # of a ratio's: 1/4, 1/2, 1, 2, 4
            assert all(b / a > 1.15 for a, b in pairwise(eighths)), (scale, kind, eighths)
        session.send("Emulation.setEmulatedVisionDeficiency", {"type": "none"})
    assert page.evaluate(FAINT, LEAST_CONTRAST) == []


def test_usual_then_compares_with_the_runs_past(open_page, server_8):
    """The late rank was not late before; the slow link was always slow."""
    page = open_page(server_8.url)
    choose_window(page, 4)
    for key, hint, late, slow in (("", "row waited", (2, 4.5), (4, 8)), ("u", "2 of 6 windows", (2, 4.5), (0.6, 1.6))):
        if key:
            page.keyboard.press(key)
        wait_until(lambda hint=hint: hint in text(page, "#matrix-hint"), hint)
        for cell, (least, most) in ((0, 5), late), ((2, 6), slow):
            point_at(page, *cell, 8)
            ratio = float(page.locator("#tooltip .ratio").first.inner_text().removesuffix("×"))
            assert least < ratio < most, (key, cell, ratio)
    assert "against what was usual then" in text(page, "#ranks-hint")
    assert "50.0 calls/s · step 16.0 ms" in text(page, "#moment")
    page.keyboard.press("{")
    wait_until(lambda: "50.0 calls/s · step 9.00 ms" in text(page, "#moment"), "before the rank was late")


def test_a_finding_is_muted_with_a_reason_and_unmuted(open_page, tmp_path, monkeypatch):
    with served(open_log(write_log(tmp_path, 8, 6, 4))) as server:
        page = open_page(server.url)
        item = page.locator("#finding-list li", has_text="Rank 5")
        item.locator(".mute").click()
        page.fill("#mute-note", "its fan is <b>on order</b>")
        page.click("#mute button:has-text('7 days')")
        page.click("#mute button[type=submit]")
        muted = page.locator("#finding-list li.muted")
        muted.wait_for()
        assert "its fan is <b>on order</b>" in muted.inner_text() and "Rank 5" in muted.inner_text()
        assert page.locator("#finding-list li").last.inner_text() == muted.inner_text(), "muted ones are last"
        assert "1 of them muted" in text(page, "#verdict")
        (mute,) = mutes_beside(tmp_path)
        assert (mute.place, mute.note) == ("column:5", "its fan is <b>on order</b>")
        days = page.evaluate("until => (until - Date.now() / 1000) / 86400", mute.until)
        assert 6.9 < days < 7.1
        muted.locator(".mute").click()
        page.click("#mute button[type=submit]")
        wait_until(lambda: page.locator("#finding-list li.muted").count() == 0, "it wakes again")
        assert mutes_beside(tmp_path) == []
        monkeypatch.setattr("eprt.diagnostics.mutes.os.access", lambda path, mode: False)
        page.reload()
        page.wait_for_selector("#finding-list .mute")
        page.locator("#finding-list .mute").first.click()
        assert "cannot be written by this process" in text(page, "#mute .why")


def test_the_drawing_has_room_for_its_text(open_page, server_8):
    page = open_page(server_8.url, width=600, height=700)
    file = download(page, "#svg")
    assert file.suggested_filename == "eprt-diagnose-wait-all-windows.svg"
    svg = file.path().read_text()
    words = [node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert any("row waited for column" in word for word in words) and "Wait" not in words
    assert any(word.startswith("1  Rank 5") for word in words) and "of the usual now" in words
    outside = """svg => {
        const drawing = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
        document.body.prepend(drawing);
        const box = drawing.getBoundingClientRect();
        const out = [...drawing.querySelectorAll("text")].filter(node => {
            const own = node.getBoundingClientRect();
            return own.left < box.left || own.right > box.right || own.top < box.top || own.bottom > box.bottom;
        });
        drawing.remove();
        return out.map(node => node.textContent);
    }"""
    assert page.evaluate(outside, svg) == []
