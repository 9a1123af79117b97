"""The page of `vitsee explore` as a reader has it, in a headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import NONE, PROGRAM, Browser
from tests.explored_pages import Page, read_page
from tests.test_explore import HOSTILE, hostile_store, page_of

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=NONE)

READY = """performance.getEntriesByName('explore:whole').length > 0
  || document.getElementById('trouble')?.hidden === false"""
OPEN_ALL = "document.querySelectorAll('details').forEach(d => d.open = true)"
VIEWS = ("cosine", "attention", "pca", "norms", "lens")
DRAWN = "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r())))"
BEYOND = """[...document.querySelectorAll('body *')].filter(e =>
  e.getBoundingClientRect().right > innerWidth + 1 &&
  !e.closest('#film, .views, .scroll, .skip, #tip')).map(e => e.outerHTML.slice(0, 120))"""
# The colour in the middle of a cell of a tile: [red, green, blue], from the canvas itself.
PIXEL = """((selector, at, u, v) => {
  const canvas = document.querySelectorAll(selector)[at], scale = devicePixelRatio;
  return [...canvas.getContext('2d').getImageData(u * scale, v * scale, 1, 1).data.slice(0, 3)];
})"""
VIRIDIS = "440154 482475 414487 355f8d 2a788e 21918c 22a884 44bf70 7ad151 bddf26 fde725"
STOPS = [[int(h[i : i + 2], 16) for i in (0, 2, 4)] for h in VIRIDIS.split(" ")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page") / "explore.html"


@pytest.fixture(scope="module")
def page(everything: Path, place: Path) -> Page:
    """Of a ViT, whose patches are counted on its own grid, 4 x 4."""
    return page_of(place, everything / "vit.zarr", "--images", 8)


@pytest.fixture(scope="module")
def two(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a ViT and a CNN."""
    place = tmp_path_factory.mktemp("two") / "explore.html"
    page_of(place, everything / "vit.zarr", everything / "cnn.zarr", "--images", 8)
    return place


def open_page(browser: Browser, place: Path, state: str = "") -> None:
    browser.open(place, state)
    browser.wait(READY)
    browser.run("scrollTo(0, 0)")


def after(browser: Browser, script: str) -> None:
    """Run it, and wait for what it changes to be drawn."""
    browser.run(script)
    browser.run(DRAWN)


def test_a_script_that_fails_ends_the_wait(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "p.html").write_text("<script>throw new Error('no such thing')</script>")
    with pytest.raises(AssertionError, match="no such thing"):
        open_page(browser, tmp_path / "p.html")
    browser.errors.clear()
    with pytest.raises(AssertionError, match=r"not within 0\.1 s: false"):
        browser.wait("false", 0.1)


def viridis(t: float) -> np.ndarray[Any, Any]:
    x = min(max(t, 0.0), 1.0) * (len(STOPS) - 1)
    i = min(int(x), len(STOPS) - 2)
    low, high = np.array(STOPS[i]), np.array(STOPS[i + 1])
    return np.asarray(low + (high - low) * (x - i))


def photo_at(browser: Browser, row: int, col: int) -> list[float]:
    """The middle of a cell of 4 x 4 on the photograph."""
    x, y, w, h = browser.run(
        "(r => [r.x, r.y, r.width, r.height])"
        "(document.getElementById('photo').getBoundingClientRect())"
    )
    return [x + (col + 0.5) / 4 * w, y + (row + 0.5) / 4 * h]


def scroll_through(browser: Browser) -> None:
    """So that panels that are drawn when they are seen are there."""
    for panel in ("others", "heads", "depths"):
        browser.run(f"document.getElementById('{panel}').scrollIntoView()")
        after(browser, "new Promise(r => setTimeout(r, 150))")


def click(browser: Browser, x: float, y: float) -> None:
    browser.point("mousePressed", x, y)
    browser.point("mouseReleased", x, y)
    browser.run(DRAWN)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_overflows_and_nothing_fails(
    browser: Browser, two: Path, width: int, dark: bool
) -> None:
    browser.look(width, dark=dark)
    for view in VIEWS:
        open_page(browser, two, f"#view={view}")
        after(browser, OPEN_ALL)
        assert browser.run(BEYOND) == []
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.run("document.querySelectorAll('#stage canvas').length") in (2, 3)
        assert browser.errors == []
        asked = [url for url in browser.requests if not url.startswith("data:")]
        assert [url.partition("#")[0] for url in asked] == [two.as_uri()]
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    red = int(background.split("(")[1].split(",")[0])
    assert (red < 60) if dark else (red > 200)


def test_a_click_shows_the_cosines_of_that_patch(
    browser: Browser, page: Page, place: Path
) -> None:
    """The colours of the map are those of the numbers that the analyses give."""
    browser.look(1280)
    open_page(browser, place, "#image=2&layer=3&scale=map")
    click(browser, *photo_at(browser, 1, 2))
    assert browser.run("location.hash") == "#image=2&patch=6&layer=3&scale=map"
    site = page.sites[0][3]
    values = site.cosines(2, [6], 2)
    others = np.delete(values, 6)
    side = browser.run("document.querySelectorAll('#stage canvas')[1].clientWidth") / 4
    for cell in (0, 3, 9, 15):
        u, v = (cell % 4 + 0.5) * side, (cell // 4 + 0.5) * side
        shown = browser.run(f"{PIXEL}('#stage canvas', 1, {u}, {v})")
        share = (values[cell] - others.min()) / (others.max() - others.min())
        assert np.abs(np.array(shown) - viridis(share)).max() <= 5, cell
    assert "patch 1,2 of 4 × 4" in browser.run(
        "document.getElementById('said').textContent"
    )
    assert browser.run("performance.getEntriesByName('explore:answer').length") >= 2


def test_a_tile_of_a_strip_chooses_patch_and_layer(
    browser: Browser, page: Page, place: Path
) -> None:
    browser.look(1280)
    open_page(browser, place, "#layer=0&patch=0")
    x, y = browser.run("(r => [r.x, r.y])(document.querySelector('#strips canvas')"
                       ".getBoundingClientRect())")  # fmt: skip
    tile = browser.run("document.querySelector('#strips canvas').clientHeight") - 21
    click(browser, x + 3 + 2 * (tile + 6) + 0.9 * tile, y + 3 + 0.9 * tile)
    state = dict(part.split("=") for part in browser.run("location.hash")[1:].split("&"))
    depths = sorted(
        {round(s.about["rel_depth"], 4) for sites in page.sites for s in sites}
    )
    third = round(page.sites[0][2].about["rel_depth"], 4)
    assert state["patch"] == "15" and depths[int(state["layer"])] == third


@pytest.mark.slow
def test_a_box_by_mouse_and_by_keys(browser: Browser, page: Page, place: Path) -> None:
    browser.look(1280)
    open_page(browser, place, "#image=1&patch=0")
    browser.point("mousePressed", *photo_at(browser, 0, 0))
    browser.point("mouseMoved", *photo_at(browser, 1, 2))
    browser.point("mouseReleased", *photo_at(browser, 1, 2))
    browser.run(DRAWN)
    assert "box=0,0,1,2" in browser.run("location.hash")
    assert "mean of 6 patches" in browser.run(
        "document.getElementById('said').textContent"
    )
    browser.run("document.getElementById('photo').focus()")
    browser.press("Escape")
    browser.press("ArrowRight")
    browser.press("ArrowDown")
    browser.run(DRAWN)
    assert "patch=5&" in browser.run("location.hash")
    browser.press("ArrowDown", shift=True)
    browser.run(DRAWN)
    assert "box=1,1,2,1" in browser.run("location.hash")
    layer = browser.run("Number(document.getElementById('layer').value)")
    browser.press("PageUp")
    browser.run(DRAWN)
    assert browser.run("Number(document.getElementById('layer').value)") == layer - 1
    assert browser.run("document.activeElement.id") == "photo"
    label = browser.run("document.activeElement.getAttribute('aria-label')")
    assert "arrow keys move it" in label and page.about["images"][1]["id"] in label


def test_an_address_leads_to_what_it_names(
    browser: Browser, page: Page, place: Path
) -> None:
    browser.look(1280)
    open_page(browser, place, "#image=3&patch=9&layer=1&view=norms")
    pressed = "[...document.querySelectorAll('#film button')].map(b => b.ariaPressed)"
    assert browser.run(pressed) == ["true" if k == 3 else "false" for k in range(8)]
    assert browser.run("document.querySelector('[name=view]:checked').value") == "norms"
    norm = float(page.sites[0][1].norms[3, 9])
    shown = browser.run("document.querySelectorAll('#stage .value')[0].textContent")
    assert shown.endswith(f"this patch: {float(f'{norm:.3g}'):.6g}"), shown
    after(browser, "document.querySelectorAll('#film button')[5].click()")
    assert browser.run("location.hash").startswith("#image=5&")
    after(browser, "location.hash = '#image=1&patch=2&view=lens'")
    assert browser.run(pressed)[1] == "true"
    after(browser, "location.hash = '#def-cosine'")
    assert browser.run("document.getElementById('def-cosine').open")
    assert browser.run("document.querySelector('[name=view]:checked').value") == "lens"


def test_heads_are_marked_in_the_block_that_is_shown(page: Page) -> None:
    """Attention has the depth of its block's output."""
    for sites, blocks in zip(page.sites, page.blocks, strict=True):
        ends = {
            one.about["name"].removesuffix(".out"): one.about["rel_depth"]
            for one in sites
        }
        assert [one.about["rel_depth"] for one in blocks] == [
            ends[one.about["name"]] for one in blocks
        ]


def test_a_screen_reader_has_a_name_for_everything(browser: Browser, two: Path) -> None:
    """Every control has a name in the accessibility tree, in every view."""
    browser.look(1280)
    spoken = {"button", "slider", "radio", "checkbox", "link", "image", "img", "region",
              "Canvas", "DisclosureTriangle", "application", "table"}  # fmt: skip
    for view in VIEWS:
        open_page(browser, two, f"#view={view}")
        scroll_through(browser)
        nodes = browser.ask("Accessibility.getFullAXTree")["nodes"]
        seen = [
            node
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in spoken
        ]
        nameless = [
            n["role"]["value"] for n in seen if not n.get("name", {}).get("value")
        ]
        assert len(seen) > 25 and not nameless, (view, nameless)
    captions = "[...document.querySelectorAll('figure')].every(f => f.querySelector('figcaption'))"
    assert browser.run(captions)
    headings = browser.run(
        "[...document.querySelectorAll('h1,h2,h3')].map(h => h.tagName)"
    )
    assert headings[0] == "H1" and headings.count("H1") == 1 and len(headings) > 4


def test_on_paper_nothing_is_cut_off(browser: Browser, two: Path) -> None:
    """Drawn for a wide window, printed on a page of 180 mm."""
    browser.look(1280)
    open_page(browser, two)
    browser.ask("Emulation.setEmulatedMedia", media="print")
    try:
        browser.run("document.getElementById('main').style.width = '680px'")
        wide = browser.run("""[...document.querySelectorAll('#main canvas')].filter(c =>
          c.checkVisibility() && c.getBoundingClientRect().width > 680).length""")
        shown = browser.run("document.getElementById('controls').checkVisibility()")
        assert wide == 0 and not shown
    finally:
        browser.ask("Emulation.setEmulatedMedia", media="")


def test_heads_other_images_and_numbers(browser: Browser, two: Path) -> None:
    """Patch 0,5 of 8 x 8 lies in 0,2 of 4 x 4."""
    page = read_page(two)
    browser.look(1280)
    open_page(browser, two, "#image=0&patch=5")
    assert (
        browser.run("document.querySelectorAll('#elsewhere canvas, #curves svg').length")
        == 0
    )
    scroll_through(browser)
    assert "softmax" in browser.run("document.getElementById('matrices').textContent")
    assert browser.run("document.querySelectorAll('#elsewhere canvas').length") == 2
    assert "most similar: " in browser.run(
        "document.getElementById('elsewhere').textContent"
    )
    browser.run("document.getElementById('numbers').open = true")
    browser.run("new Promise(r => setTimeout(r, 100))")
    rows = browser.run("document.querySelectorAll('#numbers tbody tr').length")
    assert rows == sum(len(sites) for sites in page.sites)
    values = page.sites[0][0].cosines(0, [5], 0)
    cells = browser.run("[...document.querySelectorAll('#numbers tbody tr')[0].cells]"
                        ".map(c => c.textContent)")  # fmt: skip
    assert float(cells[2]) == pytest.approx(np.delete(values, 5).mean(), abs=1e-3)
    assert browser.run("document.querySelectorAll('#curves svg .mark').length") >= rows
    open_page(browser, two, "#image=0&patch=5&view=attention&head=1")
    said = browser.run("document.querySelector('#stage .value').textContent")
    assert "head 1" in said and "% on patches" in said


def test_the_view_as_a_picture(browser: Browser, page: Page, place: Path) -> None:
    browser.look(1280)
    open_page(browser, place)
    browser.run(
        "HTMLAnchorElement.prototype.click = function () { window.saved = this; }"
    )
    browser.run("document.getElementById('save').click()")
    browser.wait("window.saved !== undefined")
    size = browser.run("""(async () => {
      const image = new Image(); image.src = window.saved.href; await image.decode();
      return [image.naturalWidth, window.saved.download]; })()""")
    assert (
        size[0] > 2000
        and size[1].startswith("explore-cosine-0-")
        and browser.errors == []
    )


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "p.html"
    page_of(out, f"<b>x={hostile_store(tmp_path)}", "--title", HOSTILE)
    browser.look(360)
    open_page(browser, out)
    after(browser, OPEN_ALL)
    assert browser.run(
        "window.pwned === undefined && document.title.startsWith('<script>')"
    )
    assert (
        browser.run(
            "document.querySelectorAll('[onerror], iframe, body img, h1 b').length"
        )
        == 0
    )
    assert browser.errors == [] and browser.run(BEYOND) == []


def test_without_script_a_line_says_so(browser: Browser, page: Page, place: Path) -> None:
    browser.ask("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.look(1280)
        browser.ask("Page.navigate", url=place.as_uri())
        seen = (str(browser.ask("DOM.getDocument", depth=-1)) for _ in range(50))
        assert any("without it there are no maps" in text for text in seen)
    finally:
        browser.ask("Emulation.setScriptExecutionDisabled", value=False)


def test_a_slider_over_the_steps_of_a_training(
    browser: Browser, everything: Path, tmp_path: Path
) -> None:
    """Three stores, given in another order: one is shown, the last at first, and the slider and the
    address choose; the panels below follow."""
    place = tmp_path / "explore.html"
    labelled = [f"vit-step{n}={everything / 'vit.zarr'}" for n in (1000, 0, 20)]
    page_of(place, *labelled, "--images", 8)
    browser.look(1280)
    open_page(browser, place)
    names = "[...document.querySelectorAll('#stage figure b')].map(b => b.textContent)"
    assert browser.run(names) == ["Photograph", "vit-step1000"]
    assert browser.run("document.getElementById('at-step').textContent") == "step 1,000"
    scroll_through(browser)
    rows = "[...document.querySelectorAll('#elsewhere figure, #matrices figure')]"
    shown = f"{rows}.filter(f => f.style.display !== 'none').map(f => f.innerText.split('\\n')[0])"
    assert all(str(text).startswith("vit-step1000") for text in browser.run(shown))
    slide = "const s = document.getElementById('step'); s.value = '0'; "
    after(browser, slide + "s.dispatchEvent(new Event('input', {bubbles: true}))")
    assert browser.run(names) == ["Photograph", "vit-step0"]
    assert "step=0" in browser.run("location.hash")
    assert browser.run("document.getElementById('at-step').textContent") == "step 0"
    scroll_through(browser)
    assert {str(text)[:9] for text in browser.run(shown)} == {"vit-step0"}
    open_page(browser, place, "#step=1")
    assert browser.run(names) == ["Photograph", "vit-step20"]
    assert not browser.errors
