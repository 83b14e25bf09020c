"""What a reader of the page does, and what is read off it."""

from tests.web.conftest import wait_until


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
