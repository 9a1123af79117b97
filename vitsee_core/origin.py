"""What a store was made from, had once more: its model and its images.

The manifest says which model, weights, transform and data; its hashes tell whether the weights and
the images are still those. Relative paths are taken from the folder that extract ran in.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import MissingInput, VitseeError

if TYPE_CHECKING:
    from vitsee_core.images import Source
    from vitsee_core.models import LoadedModel
    from vitsee_stores import Store

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Origin:
    """Where the images and the weights are now, where that is not what the manifest says."""

    data: str | None = None
    checkpoint: Path | None = None


def model_of(store: Store, checkpoint: Path | None = None) -> LoadedModel:
    """The model that a store was made with, proven by the hash of its weights.

    Args:
        store: its manifest says which model.
        checkpoint: where the file with the weights is now.

    Raises:
        VitseeError: the weights are gone, or others than the store's.
    """
    from vitsee_core.models import load_model

    record = store.manifest.model
    weights = record.get("weights", {})
    if "sha256" not in weights:
        raise MissingInput(f"{store.label} does not say which weights made it; extract it anew")
    made_in = Path(store.manifest.info.get("data_folder", "."))
    file = checkpoint
    if checkpoint is None and weights.get("source") == "checkpoint":
        file = made_in / (store.manifest.info.get("checkpoint") or weights.get("file", ""))
    try:
        model = load_model(
            _under(record["name"], "local-dir:", made_in),
            checkpoint=file,
            random_init=weights.get("seed") if file is None else None,
            img_size=tuple(record["input_size"][1:]),
            model_args=record.get("args", {}),
            ablate_skip=record.get("ablate_skip", ()),
        )
    except VitseeError as error:
        raise VitseeError(
            f"the model of {store.label} cannot be had again: {error} (name the file of its "
            "weights with --checkpoint)"
        ) from None
    if model.weights["sha256"] != weights["sha256"]:
        raise VitseeError(
            f"{record['name']} now has other weights ({model.weights['sha256'][:12]}) than "
            f"{store.label} was made with ({weights['sha256'][:12]}); name the file of those with "
            "--checkpoint, or extract anew"
        )
    return model


class Pictures:
    """Pixels of a store's images after resize and crop: as stored (`extract --inputs`), else read
    from the data and compared by hash. The data set is opened once, with the first call."""

    def __init__(self, store: Store, data: str | None = None) -> None:
        """`data`: where the images are now, as for `extract --data`; by default where they were."""
        self._store, self._data = store, data

    @cached_property
    def source(self) -> Source:
        """The data set, as `source_of` finds it."""
        return source_of(self._store, self._data)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.source.ids)}

    def __call__(self, rows: Rows) -> NDArray[np.uint8]:
        """(images, channels, height, width) uint8 of these valid rows.

        Raises:
            VitseeError: the data is gone, or holds other images.
        """
        store = self._store
        if store.has("input"):
            stored = store.array("input")
            return np.stack([stored[int(row)] for row in rows])
        from vitsee_core.images import Selection, batches

        source, samples = self.source, store.samples
        ids = samples.id[rows].tolist()
        hint = f"(name the data that {store.label} was made from with --data)"
        for name in ids:
            if name not in self._places:
                raise VitseeError(f"{source.name} no longer has the image {name!r} {hint}")
        # By name: images that came to a folder since then have moved the others on.
        index = np.array([self._places[name] for name in ids], np.int64)
        selection = Selection(source.samples_at(index), source, {})
        transform, whole = store.manifest.transform, [slice(0, len(rows))]
        with closing(batches(selection, transform, whole, on_error="fail")) as loading:
            batch = next(loading)
        for name, now, then in zip(ids, batch.hash, samples.hash[rows], strict=True):
            if now != then:
                raise VitseeError(f"{name!r} in {source.name} is another picture now {hint}")
        pixels: NDArray[np.uint8] = batch.pixels.numpy()
        return pixels

    def check_decoding(self) -> None:
        """Refuse libraries that decode or resize otherwise: the first images' pixels.

        Raises:
            VitseeError: they differ from those that the store was made with, or cannot be read.
        """
        from vitsee_core.extraction.same_images import CHECK_IMAGES, CHECK_WITHIN

        valid = self._store.valid
        for start in range(0, min(CHECK_WITHIN, len(valid)), CHECK_IMAGES):
            rows = start + np.flatnonzero(valid[start : start + CHECK_IMAGES])
            if len(rows):
                found = hashlib.sha256(self(rows).tobytes()).hexdigest()
                if found != self._store.manifest.info.get("first_images_sha256"):
                    raise VitseeError(
                        f"the images of {self._store.label} come out with other pixels here than "
                        "then (by another version of Pillow or timm)"
                    )
                return


def source_of(store: Store, data: str | None = None) -> Source:
    """The data set that a store was made from, or `data` in its place.

    Raises:
        VitseeError: it is gone, or the store does not say what it was.
    """
    from vitsee_core.images import open_source

    info = store.manifest.info
    options = info.get("data")
    if not options:
        raise MissingInput(f"{store.label} does not say where its images are; extract it anew")
    text = data if data is not None else _placed(options["data"], Path(info["data_folder"]))
    try:
        return open_source(text, split=options["split"])
    except VitseeError as error:
        raise VitseeError(
            f"the images of {store.label} cannot be read again: {error} (name where they are now "
            "with --data)"
        ) from None


def _placed(data: str, folder: Path) -> str:
    """What the data was called from `folder`, so that it can be found from here."""
    name, colon, place = data.partition(":")
    if name == "demo":
        return data
    if name.startswith("torch/"):
        return f"{name}:{folder / Path(place or '.').expanduser()}"
    if name.startswith("hfds/"):
        return f"{name}:{folder / Path(place).expanduser()}" if colon else data
    return str(folder / Path(data).expanduser())


def _under(name: str, prefix: str, folder: Path) -> str:
    """A name whose path, if it has one, was relative to `folder`."""
    if not name.startswith(prefix):
        return name
    return f"{prefix}{folder / Path(name.removeprefix(prefix)).expanduser()}"
