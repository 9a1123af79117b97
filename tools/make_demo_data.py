"""Choose the Fashion-MNIST images that ship with vitsee.

    python tools/make_demo_data.py FASHION_MNIST_DIR

FASHION_MNIST_DIR holds the four IDX files of the data set (`*-ubyte.gz`; Debian ships them in the
package dataset-fashion-mnist, under /usr/share/datasets). Of each class, 200 training and 200 test
images are drawn with a fixed seed and kept in the data set's order; the same input gives the same
bytes, whenever it is run. Writes vitsee_core/demo/fashion_mnist.npz and its licence.
"""

from __future__ import annotations

import argparse
import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PER_CLASS = 200
SEED = 0
CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
LICENCE = """\
fashion_mnist.npz holds 2000 training and 2000 test images of Fashion-MNIST
(https://github.com/zalandoresearch/fashion-mnist), chosen by tools/make_demo_data.py.

The MIT License (MIT)

Copyright (c) 2017 Zalando SE, https://tech.zalando.com

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or
substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT
OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in a gzipped IDX file of unsigned bytes."""
    with gzip.open(path) as file:
        raw = file.read()
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def choose(labels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.int64]:
    """Row numbers of `PER_CLASS` images of each class, ascending."""
    members = [np.flatnonzero(labels == label) for label in range(len(CLASSES))]
    return np.sort(
        np.concatenate([rng.choice(m, PER_CLASS, replace=False) for m in members])
    )


def collect(source: Path) -> dict[str, NDArray[np.generic]]:
    """The arrays of the .npz file: images, labels, splits, class_names."""
    rng = np.random.default_rng(SEED)
    images, labels, splits = [], [], []
    for split, stem in (("train", "train"), ("test", "t10k")):
        all_labels = read_idx(source / f"{stem}-labels-idx1-ubyte.gz")
        rows = choose(all_labels, rng)
        images.append(read_idx(source / f"{stem}-images-idx3-ubyte.gz")[rows])
        labels.append(all_labels[rows].astype(np.int64))
        splits += [split] * len(rows)
    return {
        "images": np.concatenate(images),
        "labels": np.concatenate(labels),
        "splits": np.array(splits),
        "class_names": np.array(CLASSES),
    }


def write_npz(path: Path, arrays: dict[str, NDArray[np.generic]]) -> None:
    """A compressed .npz file whose bytes do not depend on the day it is written."""
    with zipfile.ZipFile(path, "w") as file:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=False)
            member = zipfile.ZipInfo(f"{name}.npy", (2017, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(member, buffer.getvalue(), compresslevel=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, metavar="FASHION_MNIST_DIR")
    source = parser.parse_args().source
    target = Path(__file__).parents[1] / "vitsee_core" / "demo"
    write_npz(target / "fashion_mnist.npz", collect(source))
    (target / "LICENSE.fashion-mnist").write_text(LICENCE)


if __name__ == "__main__":
    main()
