"""Draws docs/explore.png: what a page of `vitsee explore` shows, in a headless Chromium.

    vitsee demo --real -o real-out
    vitsee explore vit=real-out/stores/vit-saliency.zarr real-out/stores/lite0.zarr --recompute \\
        --trust-store -o explore.html
    PYTHONPATH=. python tools/explore_picture.py explore.html docs/explore.png

The page's own "Save PNG" draws the same view larger.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path

from pictures import MOST_BYTES
from PIL import Image

from tests.browser import Browser
from tests.explored_pages import read_page

WIDTH, HEIGHT, COLOURS = 1120, 800, 128
IMAGE, PATCH, LAYER = "chelsea", 101, 18
WHOLE = "performance.getEntriesByName('explore:whole').length > 0"
# The page draws what comes into sight: heads come up to the layers, smaller than they are there.
ALONE = """document.querySelectorAll("#others, .how").forEach((x) => x.style.display = "none");
document.getElementById("heads").scrollIntoView()"""
DRAWN = "document.querySelector('#matrices canvas') !== null"
SMALLER = (
    """document.querySelector('#matrices canvas').style.zoom = "0.62"; scrollTo(0, 0)"""
)
BOTTOM = "document.getElementById('heads').getBoundingClientRect().bottom + scrollY"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--image", default=IMAGE, help="part of its name")
    parser.add_argument("--patch", type=int, default=PATCH, help="counted by rows")
    parser.add_argument(
        "--layer", type=int, default=LAYER, help="as the page's address has it"
    )
    args = parser.parse_args()
    about = read_page(args.page).about
    image = next(
        i for i, one in enumerate(about["images"]) if args.image in str(one["id"])
    )
    data = picture(args.page, f"#image={image}&patch={args.patch}&layer={args.layer}")
    args.output.write_bytes(data)
    print(f"{args.output}: {len(data) / 1000:.0f} kB")
    if len(data) > MOST_BYTES:
        sys.exit(f"larger than {MOST_BYTES // 1000} kB")


def picture(page: Path, state: str) -> bytes:
    """The upper part of a page in this state, and what heads attend to, in few colours."""
    # Processes of a browser that has ended may still write to its profile.
    profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with profile as folder, Browser(Path(folder) / "profile") as browser:
        browser.look(WIDTH, height=HEIGHT)
        browser.ask("Emulation.setScrollbarsHidden", hidden=True)
        whole = Path(folder) / "whole.png"
        browser.open(page, state)
        browser.wait(WHOLE)
        browser.run(ALONE)
        browser.wait(DRAWN)
        browser.run(SMALLER)
        height = browser.run(BOTTOM)
        browser.picture(whole)
        with Image.open(whole) as opened:
            part = opened.convert("RGB").crop((0, 0, opened.width, int(height) + 12))
    out = io.BytesIO()
    part.quantize(COLOURS, Image.Quantize.MEDIANCUT, kmeans=8).save(
        out, "png", optimize=True
    )
    return out.getvalue()


if __name__ == "__main__":
    main()
