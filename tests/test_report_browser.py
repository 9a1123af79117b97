"""The report as a reader has it, in a headless Chromium: `make report-check`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import NONE, PROGRAM, Browser
from tests.every_command import TABLES, vitsee
from tests.test_report import HOSTILE, hostile_folder

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=NONE)

# What lies beyond the right edge, but for what scrolls in a frame of its own.
BEYOND = """[...document.querySelectorAll('body *')].filter(e =>
  e.getBoundingClientRect().right > innerWidth + 1 &&
  !e.closest('.scroll, pre, .sheet, .skip, #tip')).map(e => e.outerHTML.slice(0, 120))"""
# Labels of charts that the edge of the chart cuts.
CUT = """[...document.querySelectorAll('.chart svg text')].filter(t => {
  const own = t.getBoundingClientRect(), all = t.closest('svg').getBoundingClientRect();
  const inside = own.left >= all.left - 1 && own.right <= all.right + 1;
  return own.width && !(inside && own.bottom <= all.bottom + 1);
}).map(t => t.textContent)"""
LATER = "new Promise(r => setTimeout(r, 100))"  # details tell of their opening in a task
SETTLED = "document.querySelectorAll('details').forEach(d => d.open = true)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a figure of each kind."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(everything)
        for command in (
            "cka",
            "attn-dist",
            "norms",
            "attn-map",
            "head-types",
            "knn",
            "weights",
        ):
            result = folder / f"{command}.csv"
            vitsee(
                command,
                *TABLES[command][-1],
                "-o",
                result,
                "--png",
                result.with_suffix(".png"),
            )
    vitsee("report", folder)
    return folder / "report.html"


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_overflows_and_nothing_fails(
    browser: Browser, page: Path, width: int, dark: bool
) -> None:
    browser.look(width, dark=dark)
    browser.open(page)
    browser.run(SETTLED)
    browser.run(LATER)
    assert browser.run(BEYOND) == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    pictures = (
        "[...document.querySelectorAll('.sheet img')].map(i => i.complete && i.naturalWidth > 0"
        " && i.alt.length > 20)"
    )
    assert browser.run(pictures) == [True] * 7
    drawn = (
        "[...document.querySelectorAll('.thumb')].map(t => t.querySelector('img, svg') "
        "!== null)"
    )
    assert browser.run(drawn) == [True] * 7
    small = "[...document.querySelectorAll('.thumb img')].every(i => i.naturalWidth > 0)"
    assert browser.run(small)
    assert browser.run("document.querySelectorAll('.chart svg .mark').length") > 100
    assert browser.run(CUT) == []
    assert browser.errors == []
    assert [r for r in browser.requests if not r.startswith("data:")] == [page.as_uri()]
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    red = int(background.split("(")[1].split(",")[0])
    assert (red < 60) if dark else (red > 200)


@pytest.mark.slow
def test_heatmaps_are_in_place_of_their_figures_and_curves_come_when_asked(
    browser: Browser, page: Path
) -> None:
    browser.look(1400)
    browser.open(page)
    assert browser.run("document.querySelectorAll('.sheets[open]').length") == 0
    assert browser.run("document.querySelectorAll('.sheets').length") == 1, "of cka"
    marks = "document.querySelectorAll('.drawn .mark').length"
    assert browser.run(marks) == 0 and browser.run(
        "document.querySelector('.drawn[hidden]') === null"
    )
    browser.run("document.querySelectorAll('.drawn').forEach(d => d.open = true)")
    browser.run(LATER)
    assert browser.run(marks) > 50


def test_a_tile_is_one_link_to_its_card(browser: Browser, page: Path) -> None:
    browser.look(1400)
    browser.open(page)
    tile = "document.querySelector('.tile')"
    assert browser.run(f"{tile}.querySelectorAll('a, button, [tabindex]').length") == 1
    browser.run(f"{tile}.scrollIntoView()")
    under = (
        "(box => document.elementFromPoint(box.x + 40, box.y + 40).closest('a')?.hash)"
    )
    place = browser.run(f"{under}({tile}.getBoundingClientRect())")
    assert place == browser.run(f"{tile}.querySelector('a').hash")
    assert browser.run(f"document.querySelector('{place}').textContent") == browser.run(
        f"{tile}.querySelector('a').textContent"
    )


@pytest.mark.parametrize(("width", "expected"), [(360, False), (1400, True)])
def test_contents_are_collapsed_on_a_phone(
    browser: Browser, page: Path, width: int, expected: bool
) -> None:
    browser.look(width)
    browser.open(page)
    opened = browser.run(
        "[...document.querySelectorAll('.side details')].map(d => d.open)"
    )
    assert len(opened) > 3 and {*opened} == {expected}


def test_a_mark_says_what_it_is_to_keys_and_pointer(browser: Browser, page: Path) -> None:
    browser.look(1400)
    browser.open(page)
    stops = browser.run("document.querySelectorAll('.chart svg [tabindex=\"0\"]').length")
    assert stops == browser.run(
        "document.querySelectorAll('.chart svg[role=group]').length"
    ), "one per chart"
    heat = "[...document.querySelectorAll('.chart svg')].find(s => s.querySelector('rect.mark'))"
    browser.run(f"{heat}.querySelector('[tabindex=\"0\"]').focus()")
    first = browser.run("document.activeElement.getAttribute('aria-label')")
    assert first.startswith("vit embedding × cnn stem; CKA ")
    assert "95 %" in first and "n = 8" in first
    tip = "document.getElementById('tip')"
    assert not browser.run(f"{tip}.hidden") and browser.run(
        f"{tip}.textContent"
    ).startswith("vit")
    browser.press("ArrowUp")
    up = browser.run("document.activeElement.getAttribute('aria-label')")
    assert up.startswith("vit block 0 × cnn stem; CKA ")
    browser.press("ArrowRight")
    assert "× cnn layer" in browser.run(
        "document.activeElement.getAttribute('aria-label')"
    )
    browser.press("Escape")
    assert browser.run(f"{tip}.hidden")
    browser.run(f"{heat}.querySelectorAll('.mark')[3].dispatchEvent(new PointerEvent('pointermove',"
                " {bubbles: true, clientX: 600, clientY: 300}))")  # fmt: skip
    label = browser.run(f"{heat}.querySelectorAll('.mark')[3].getAttribute('aria-label')")
    assert browser.run(f"{tip}.textContent") == label.replace("; ", "\n")


@pytest.mark.slow
def test_tables_sort_by_number_and_by_name(browser: Browser, page: Path) -> None:
    browser.look(1400)
    browser.open(page)
    browser.run(SETTLED)
    click = """(name) => { const th = [...document.querySelectorAll('th')].find(t =>
      t.textContent === name); th.firstChild.click();
      return [th.getAttribute('aria-sort'), [...th.closest('table').tBodies[0].rows].map(r =>
      r.cells[th.cellIndex].textContent)]; }"""
    sort, cells = browser.run(f"({click})('value')")
    assert sort == "ascending" and [*map(float, cells)] == sorted(map(float, cells))
    sort, cells = browser.run(f"({click})('value')")
    assert sort == "descending" and [*map(float, cells)] == sorted(
        map(float, cells), reverse=True
    )
    sort, cells = browser.run(f"({click})('site_a')")
    assert sort == "ascending" and cells[0].startswith("blocks.0") and len({*cells}) > 2


@pytest.mark.slow
def test_hostile_names_run_nothing(
    browser: Browser, tmp_path: Path, everything: Path
) -> None:
    folder = hostile_folder(everything, tmp_path)
    vitsee("report", folder, "--title", HOSTILE)
    browser.look(360)
    browser.open(folder / "report.html")
    browser.run(SETTLED)
    assert browser.run(
        "window.pwned === undefined && document.title.startsWith('<script>')"
    )
    assert browser.run(
        "document.querySelectorAll('script, [onerror], iframe, img').length"
    ) == (2 + browser.run("document.querySelectorAll('.sheet img, .thumb img').length"))
    assert browser.errors == [] and browser.run(BEYOND) == []
    assert len([r for r in browser.requests if not r.startswith("data:")]) == 1
