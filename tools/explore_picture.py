"""Draws docs/explore.png: what a page of `vitsee explore` shows, in a headless Chromium.

    vitsee demo --quick -o FOLDER
    PYTHONPATH=. python tools/explore_picture.py FOLDER/explore.html docs/explore.png

The page's own "Save PNG" draws the same view larger.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path

from pictures import COLOURS, METHOD, MOST_BYTES
from PIL import Image

from tests.browser import Browser
from tests.explored_pages import read_page

WIDTH, HEIGHT = 1120, 800
CLASS, PATCH, LAYER = "Bag", 35, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    about = read_page(args.page).about
    label = next((k for k, name in about["labels"].items() if name == CLASS), "0")
    image = next((i for i, one in enumerate(about["images"]) if str(one["label"]) == label), 0)
    data = picture(args.page, f"#image={image}&patch={PATCH}&layer={LAYER}")
    args.output.write_bytes(data)
    print(f"{args.output}: {len(data) / 1000:.0f} kB")
    if len(data) > MOST_BYTES:
        sys.exit(f"larger than {MOST_BYTES // 1000} kB")


def picture(page: Path, state: str) -> bytes:
    """The upper part of a page in this state, in few colours."""
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile") as browser:
        browser.look(WIDTH, height=HEIGHT)
        whole = Path(folder) / "whole.png"
        browser.ask("Page.navigate", url=f"{page.absolute().as_uri()}{state}")
        browser.run(
            "new Promise(done => { const look = () => performance.getEntriesByName("
            "'explore:whole').length ? done() : setTimeout(look, 50); look(); })"
        )
        height = browser.run(
            "document.querySelector('.how:not([hidden])').getBoundingClientRect().top + scrollY"
        )
        browser.picture(whole)
        with Image.open(whole) as opened:
            part = opened.convert("RGB").crop((0, 0, opened.width, int(height) - 12))
    out = io.BytesIO()
    part.quantize(COLOURS, METHOD).save(out, "png", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    main()
