"""A page of `vitsee explore` of the size that papers have: how large it is, how soon it opens in a
headless Chromium, how soon a click is answered, by the page's own marks.

    PYTHONPATH=. python benchmarks/explore.py [--models 3] [--images 12] [--folder /tmp/explore]

ViT-B/16 with random weights (a seed each) over pictures of coloured shapes and noise of 320 x 256
pixels, with full attention. What random weights make of noise needs more axes than trained features
of photographs do: the page has the most that it may. The bars: 13 MB, 2 s, 50 ms, on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
from common import Result, add_record_option, machine, record
from PIL import Image, ImageDraw

import vitsee
from tests.browser import Browser

MODEL = "vit_base_patch16_224"
CLICKS, OPENINGS = 24, 5
MARK = "performance.getEntriesByName('explore:{}')"


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument(
        "--folder", type=Path, help="where stores and page stay [temporary]"
    )
    add_record_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        page = made(folder, args.models, args.images)
        opened, answered = seen(page, folder / "profile")
        size = page.stat().st_size / 1e6
    print(machine())
    what = f"{args.images} images x {args.models} ViT-B/16, all layers and heads"
    rows = [
        Result(f"{what}: the page", size, None, None, "MB"),
        Result("opened, until the first view is drawn", opened / 1e3, None, None, "s"),
        Result(
            "a click on a patch, until every map is drawn", answered, None, None, "ms"
        ),
    ]
    for row in rows:
        assert row.ours is not None
        print(f"{row.what}: {row.ours:.4g} {row.unit}")
    if args.record:
        record("explore", "A page to click through patches, in a headless Chromium", rows)


def made(folder: Path, n_models: int, n_images: int) -> Path:
    """The page of stores that are made where they are not there."""
    data, page = folder / "photos", folder / "explore.html"
    if not data.exists():
        data.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for k in range(n_images):
            picture(rng).save(data / f"{k:03d}.png")
    stores = [folder / f"b16-{seed}.zarr" for seed in range(n_models)]
    for seed, store in enumerate(stores):
        vitsee.extract(MODEL, data, store, random_init=seed, sites="blocks", attention="full",
                       residual=False)  # fmt: skip
    vitsee.explore(*stores, output=page, images=n_images, force=True)
    return page


def picture(rng: np.random.Generator) -> Image.Image:
    """Shapes on a smooth ground, with noise."""
    ground = rng.integers(0, 256, (6, 7, 3), np.uint8)
    image = Image.fromarray(ground).resize((320, 256), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y, w, h = (int(v) for v in rng.integers((0, 0, 15, 15), (300, 230, 90, 90)))
        colour = tuple(int(v) for v in rng.integers(0, 255, 3))
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((x, y, x + w, y + h), fill=colour)
    noisy = np.asarray(image) + rng.normal(0, 9, (256, 320, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def seen(page: Path, profile: Path) -> tuple[float, float]:
    """Medians in milliseconds: opening, and answering a click."""
    with Browser(profile) as browser:
        browser.look(1280)
        opened = []
        for _ in range(OPENINGS):
            browser.ask("Page.navigate", url="about:blank")
            browser.ask("Page.navigate", url=page.absolute().as_uri())
            ready = MARK.format("ready")
            browser.run(
                f"new Promise(done => {{ const look = () => {ready}.length ? done() : "
                "setTimeout(look, 20); look(); })"
            )
            opened.append(float(browser.run(f"{ready}[0].duration")))
        answers = MARK.format("answer")
        x, y, w, h = browser.run(
            "(r => [r.x, r.y, r.width, r.height])(document.getElementById('photo')"
            ".getBoundingClientRect())"
        )
        rng = np.random.default_rng(0)
        answered = []
        for u, v in rng.uniform(0.02, 0.98, (CLICKS, 2)):
            n = browser.run(f"{answers}.length")
            browser.point("mousePressed", x + u * w, y + v * h)
            browser.point("mouseReleased", x + u * w, y + v * h)
            browser.run(
                f"new Promise(done => {{ const look = () => {answers}.length > {n} ? done() : "
                "setTimeout(look, 5); look(); })"
            )
            answered.append(float(browser.run(f"{answers}.at(-1).duration")))
        assert browser.errors == [], browser.errors
    return statistics.median(opened), statistics.median(answered)


if __name__ == "__main__":
    main()
