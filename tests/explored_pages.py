"""The numbers of a page of `vitsee explore`, read in Python: a port of its packed format and of its
arithmetic, written from their description."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Site:
    """about: as the page describes it; along: (images, cells); codes: (dims, images, cells);
    norms: (images, cells); colours: (images, cells, 3); classes, shares: (images, 1 + cells)."""

    about: dict[str, Any]
    along: Array
    codes: Array
    norms: Array
    colours: Array | None = None
    classes: Array | None = None
    shares: Array | None = None

    def vector(self, image: int, cell: int) -> Array:
        """(1 + dims,) numbers whose products are cosines."""
        codes = self.about["step"] * self.codes[:, image, cell]
        return np.array([self.along[image, cell] / 32767, *codes])

    def cosines(self, image: int, cells: list[int], other: int) -> Array:
        """(cells,) of the mean of some patches of an image with every patch of another."""
        n = self.along.shape[1]
        own = [(float(self.norms[image, c]), self.vector(image, c)) for c in cells]
        mean = np.sum([norm * v for norm, v in own], axis=0)
        square = mean @ mean + sum(norm**2 * (1 - v @ v) for norm, v in own)
        found = np.array([mean @ self.vector(other, t) for t in range(n)])
        if image == other:
            for (norm, v), cell in zip(own, cells, strict=True):
                found[cell] += norm * (1 - v @ v)
        return np.where(self.norms[other] > 0, found / np.sqrt(square), np.nan)


@dataclass
class Block:
    """heads: (images, heads, cells); patches: (images, queries, cells) or None."""

    about: dict[str, Any]
    heads: Array
    patches: Array | None


@dataclass
class Page:
    """text: all of it; about: its JSON; sites, blocks: by model."""

    text: str
    about: dict[str, Any]
    sites: list[list[Site]]
    blocks: list[list[Block]]

    def image(self, name: str) -> int:
        """The place of the image of this id."""
        return [one["id"] for one in self.about["images"]].index(name)

    def site(self, model: int, name: str) -> Site:
        """By its name."""
        return next(site for site in self.sites[model] if site.about["name"] == name)


class _Reader:
    def __init__(self, text: str) -> None:
        self.data, self.at = zlib.decompress(base64.b64decode(text)), 0

    def take(self, kind: str, *shape: int) -> Array:
        n = int(np.prod(shape))
        found = np.frombuffer(self.data, kind, n, self.at).reshape(shape)
        self.at += -(-found.nbytes // 4) * 4
        return found


def read_page(path: Path) -> Page:
    """A page as numbers; every byte of them is used."""
    text = path.read_text("utf-8")
    match = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
    )
    assert match is not None
    about = json.loads(match[1])
    blobs = dict(
        re.findall(r'<script type="text/plain" id="blob-(\w+)">(.*?)</script>', text)
    )
    n = len(about["images"])
    sites, blocks = [], []
    for k, model in enumerate(about["models"]):
        readers = {
            kind: _Reader(blobs[f"{kind}{k}"]) for kind in ("tokens", "norms", "colours")
        }
        readers |= {kind: _Reader(blobs[f"{kind}{k}"]) for kind in ("lens", "attention")
                    if f"{kind}{k}" in blobs}  # fmt: skip
        sites.append([_site(one, n, readers) for one in model["sites"]])
        attention = model["attention"]
        described = [] if isinstance(attention, str) else attention["blocks"]
        blocks.append([_block(one, n, readers["attention"]) for one in described])
        assert all(reader.at == len(reader.data) for reader in readers.values())
    return Page(text, about, sites, blocks)


def _site(about: dict[str, Any], n: int, readers: dict[str, _Reader]) -> Site:
    cells = about["grid"][0] * about["grid"][1]
    tokens = readers["tokens"]
    found = Site(
        about,
        tokens.take("<i2", n, cells),
        tokens.take("i1", about["dims"], n, cells),
        (readers["norms"].take("<u2", n, cells).astype("<u4") << 16).view("<f4"),
    )
    if about["colours"]:
        found.colours = readers["colours"].take("u1", n, cells, 3)
    if about["lens"]:
        found.classes = readers["lens"].take("<u2", n, 1 + cells)
        found.shares = readers["lens"].take("u1", n, 1 + cells)
    return found


def _block(about: dict[str, Any], n: int, reader: _Reader) -> Block:
    cells = about["grid"][0] * about["grid"][1]

    def rows(m: int) -> Array:
        most, values = reader.take("<u2", n, m), reader.take("u1", n, m, cells)
        return values * (most / (65535 * 255))[..., np.newaxis]

    heads = rows(about["heads"])
    return Block(about, heads, rows(len(about["queries"])) if about["queries"] else None)
