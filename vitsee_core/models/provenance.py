"""The model, the images and the classifier that a store was made with, loaded again.

The manifest names model, weights, transform and data; its hashes show whether the weights and the
images are still those. Relative paths are taken from the folder that extract ran in.

A manifest travels with its store, so it is not believed about what to open. A command that extracts
and reads the same stores (a study) knows by its own words which model is whose: `naming`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.models.weights import stored_classifier
from vitsee_core.runtime.machine import human_bytes, memory_bytes
from vitsee_core.runtime.options import Option
from vitsee_stores.errors import MissingInput, NotOffered, VitseeError
from vitsee_stores.manifest import jsonable
from vitsee_stores.url import is_url

if TYPE_CHECKING:
    from vitsee_core.images import ImageSource
    from vitsee_core.models.loaded import LoadedModel
    from vitsee_core.models.weights import Classifier
    from vitsee_stores import Store


Rows = NDArray[np.int64]
MOST_PIXELS = 1 << 14  # along one side of the input
PIXEL_BYTES = (
    256  # a forward pass takes for each pixel of one image, at least; ViT-S/16 more
)


DATA = Option(
    "Where the images are now, for what has to be recomputed.",
    metavar="DATA",
    default="where extract read them",
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Provenance:
    """The places of the images and the weights now, where they differ from the manifest's. trust:
    the store is the user's own, so that folders and repositories it names may be opened."""

    data: Annotated[str | None, DATA] = None
    checkpoint: Annotated[
        Path | None,
        Option(
            "Where the weights are now, where the store's model is needed again.",
            metavar="FILE",
            default="where extract read them",
        ),
    ] = None
    trust: Annotated[
        bool,
        Option(
            "For your own store: take its model from the folder or the hub that it "
            "names.  [default: only timm's models and files that this machine has, no "
            "network]",
            "--trust-store",
        ),
    ] = False


@dataclass(frozen=True)
class NamedModel:
    """A model as the running command itself names it. name: its folder, if relative, is in the
    working folder; args: of the model; trust_remote_code: code of its repository may run."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


_NOTHING: Mapping[Path, NamedModel] = MappingProxyType({})
_NAMED = ContextVar("_NAMED", default=_NOTHING)


@contextmanager
def naming(models: Mapping[Path, NamedModel]) -> Iterator[None]:
    """Within, `model_of` opens for a store in one of these folders the model that stands here,
    whatever folder or repository the store names, and checks it by the hash of its weights.

    models: a store's folder -> the model that the running command extracts it from. Nothing that
    was read from a file belongs here.
    """
    # A context variable, so that threads do not see one another's models.
    token = _NAMED.set({place.resolve(): model for place, model in models.items()})
    try:
        yield
    finally:
        _NAMED.reset(token)


def _named_for(store: Store) -> NamedModel | None:
    """The model that the running command names for a store; None if none, or of other arguments."""
    # Models are named by folder; a URL has none.
    if is_url(str(store.place)):
        return None
    found = _NAMED.get().get(store.path.resolve())
    same = found is not None and jsonable(dict(found.args)) == store.manifest.model.get(
        "args", {}
    )
    return found if same else None


def model_of(
    store: Store, checkpoint: Path | None = None, *, trust: bool = False
) -> LoadedModel:
    """The model that a store was made with, proven by the hash of its weights.

    It is the one that the running command names for the store (`naming`), if it names one.
    Otherwise the manifest says which, and is not trusted without `trust`: then the model is one of
    timm's own or the demo's with weights that this machine has, or of a checkpoint file, which is
    read without running code; its arguments are sizes and switches of layers.

    Raises:
        VitseeError: the weights are missing, or others than the store's; a manifest that asks
            for what is not allowed without `trust`.
    """
    from vitsee_core.models.load import load_model
    from vitsee_core.models.sources import source_of
    from vitsee_core.models.sources.base import OWN_TRANSFORM

    _check_record(store)
    record = store.manifest.model
    canvas = store.plan.canvas
    weights, (_, *size) = record["weights"], record["input_size"]
    if canvas is not None and canvas.tiles is not None:
        raise MissingInput(
            f"{store.label} was made of tiles of {canvas.tiles[1]} x {canvas.tiles[0]} "
            "pixels, and nothing is recomputed on tiles; extract anew without --tiles"
        )
    if canvas is not None and canvas.own_grids:
        raise MissingInput(
            f"{store.label} was made of images of several sizes at native resolution, "
            "and nothing is recomputed on them; extract anew without --native"
        )
    if not trust:
        _check_size(store, (size[0], size[1]))
    if changed := record.get("interventions"):
        raise MissingInput(
            f"{store.label} was made with {'; '.join(map(str, changed))}, and nothing is "
            "recomputed of a changed model; extract it again with what is needed"
        )
    if weights.get("source") == "module":
        raise MissingInput(
            f"{store.label} was made in Python from a torch module, which no store "
            "brings back; extract it again with what is needed"
        )
    info = store.manifest.info
    # Relative paths of the manifest are of the folder in which extract ran.
    made_in = Path(info.get("data_folder", "."))
    file = checkpoint
    key = None
    if checkpoint is None and weights.get("source") == "checkpoint":
        file = made_in / (info.get("checkpoint") or weights.get("file") or "")
        key = weights.get("key") or None
    weights_size = weights.get("weights_size")
    remote_code = record.get("origin", {}).get("trust_remote_code") is True
    own = _named_for(store)
    allowed = trust if own is None else own.trust_remote_code
    try:
        model = load_model(
            source_of(record["name"]).placed(made_in) if own is None else own.name,
            checkpoint=file,
            checkpoint_key=key,
            weights_size=(weights_size[0], weights_size[1]) if weights_size else None,
            resample_patches=weights.get("resample_patches") is True,
            random_init=weights.get("seed") if file is None else None,
            img_size=(size[0], size[1]),
            model_args=record.get("args", {}),
            ablate_skip=tuple(record.get("ablate_skip", ())),
            transform=OWN_TRANSFORM,  # images are prepared as the store says
            trust_remote_code=allowed and remote_code,
            foreign=None if trust or own is not None else store.label,
        )
    except VitseeError as error:
        hint = (
            ""
            if "--" in str(error)
            else " (name the file of its weights with --checkpoint)"
        )
        raise VitseeError(
            f"the model of {store.label} cannot be loaded again: {error}{hint}"
        ) from None
    # The hash decides, whatever the names say.
    if model.weights["sha256"] != weights["sha256"]:
        raise VitseeError(
            f"{model.name} now has other weights ({model.weights['sha256'][:12]}) than "
            f"{store.label} was made with ({weights['sha256'][:12]}); name the file of "
            "those with --checkpoint, or extract anew"
        )
    return model


def _check_record(store: Store) -> None:
    """Raise MissingInput for a manifest without a record of its model, or of other types."""
    model = store.manifest.model
    info = store.manifest.info
    try:
        weights = model.get("weights")
        args = model.get("args", {})
        if not isinstance(weights, dict):
            raise TypeError("no weights")
        _, height, width = model["input_size"]
        texts = [model["name"], weights["sha256"], weights.get("source", "")]
        texts += [
            info.get("checkpoint") or weights.get("file") or "",
            weights.get("key") or "",
        ]
        if not all(
            isinstance(x, str) for x in (*texts, *model.get("ablate_skip", ()), *args)
        ):
            raise TypeError("text")
        if not all(type(x) is int and 0 < x <= MOST_PIXELS for x in (height, width)):
            raise ValueError("input_size")
        seed = weights.get("seed")
        # Raises AttributeError for an origin that is not a mapping.
        _ = model.get("origin", {}).get("trust_remote_code")
        trained_size = weights.get("weights_size") or (1, 1)
        if len(trained_size) != 2 or not all(type(x) is int for x in trained_size):
            raise TypeError("weights_size")
        if not isinstance(args, dict) or not isinstance(seed, int | None):
            raise TypeError("args or seed")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MissingInput(
            f"{store.label} does not say which weights made it ({error}); extract it anew"
        ) from None


def _check_size(store: Store, size: tuple[int, int]) -> None:
    """Refuse, before any work, an input size that is not that of the store's sites, or too large.

    Raises:
        MissingInput: the cells of no site cover half of it, or this machine's memory is too small.
    """
    layouts = [site.layout for site in store.plan.sites if site.layout is not None]
    cells = [(at.grid, at.stride_px) for at in layouts if at.grid and at.stride_px]
    for axis in (0, 1) if cells else ():
        covered = max(grid[axis] * stride_px[axis] for grid, stride_px in cells)
        # Twice the cells, as a grid may leave a border; a false size would take memory
        # before the hash of the weights is known.
        if size[axis] > 2 * covered:
            raise MissingInput(
                f"{store.label} says that its input has {size[0]} x {size[1]} pixels, "
                f"and its sites cover {covered:g} of {size[axis]}; extract it anew"
            )
    need = PIXEL_BYTES * size[0] * size[1]
    memory = memory_bytes()
    if need > memory:
        raise MissingInput(
            f"{store.label} was made of {size[0]} x {size[1]} pixels: its model takes "
            f"about {human_bytes(need)}, this machine has {human_bytes(memory)}"
        )


class Pictures:
    """Pixels of a store's images after resize and crop: as stored (`extract --inputs`), else read
    from the data and compared by hash. The data set is opened once, with the first call."""

    def __init__(self, store: Store, data: str | None = None) -> None:
        """`data`: where the images are now, as for `extract --data`; by default where they were."""
        self._store = store
        self._data = data

    @cached_property
    def source(self) -> ImageSource:
        """The data set, as `source_of` finds it."""
        return source_of(self._store, self._data)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.source.ids)}

    def __call__(self, rows: Rows) -> NDArray[np.uint8]:
        """(images, channels, height, width) uint8 of these valid rows.

        Raises:
            VitseeError: the data is missing, or has other images.
        """
        store = self._store
        if store.has("input"):
            stored = store.array("input")
            return np.stack([stored[int(row)] for row in rows])
        from vitsee_core.images import Selection, batches

        source = self.source
        samples = store.samples
        ids = samples.id[rows].tolist()
        hint = f"(name the data that {store.label} was made from with --data)"
        for name in ids:
            if name not in self._places:
                raise VitseeError(
                    f"{source.name} no longer has the image {name!r} {hint}"
                )
        # By name: images that came to a folder since then have moved the others on.
        index = np.array([self._places[name] for name in ids], np.int64)
        selection = Selection(source.samples_at(index), source, {})
        transform = store.manifest.transform
        whole = [slice(0, len(rows))]
        with closing(batches(selection, transform, whole, on_error="fail")) as loading:
            batch = next(loading)
        for name, now, then in zip(ids, batch.hash, samples.hash[rows], strict=True):
            if now != then:
                raise VitseeError(
                    f"{name!r} in {source.name} is another picture now {hint}"
                )
        return batch.pixels.numpy()

    def check_decoding(self) -> None:
        """Refuse libraries that decode or resize otherwise: the first images' pixels.

        Raises:
            VitseeError: they differ from those that the store was made with, or cannot be read.
        """
        from vitsee_core.models.same_origin import CHECK_IMAGES, CHECK_WITHIN

        valid = self._store.valid
        for start in range(0, min(CHECK_WITHIN, len(valid)), CHECK_IMAGES):
            # The same rows as extract took: the first range of these with a readable
            # image.
            rows = start + np.flatnonzero(valid[start : start + CHECK_IMAGES])
            if len(rows):
                found = hashlib.sha256(self(rows).tobytes()).hexdigest()
                if found != self._store.manifest.info.get("first_images_sha256"):
                    raise VitseeError(
                        f"the images of {self._store.label} come out with other pixels "
                        "here than then (by another version of Pillow or timm)"
                    )
                return


def source_of(store: Store, data: str | None = None) -> ImageSource:
    """The data set that a store was made from, or `data` in its place.

    Raises:
        VitseeError: it is missing, or the store does not name it.
    """
    from vitsee_core.images import open_source
    from vitsee_core.images.sources import placed

    info = store.manifest.info
    options = info.get("data")
    if not options:
        raise MissingInput(
            f"{store.label} does not say where its images are; extract it anew"
        )
    if data is None and (
        is_url(text := str(options["data"])) or text.startswith("hfds/")
    ):
        raise MissingInput(
            f"{store.label} was made from {text[:80]}, which a store may not open by "
            "itself (name it, or where its images are now, with --data)"
        )
    text = (
        data if data is not None else placed(options["data"], Path(info["data_folder"]))
    )
    own = {key: options.get(key) for key in ("label_key", "image_column", "label_column")}
    # Columns and keys are of one kind of file, which other data need not be.
    if Path(text).suffix != Path(str(options["data"])).suffix:
        own = {}  # of files of that kind
    try:
        clips = store.plan.clip is not None
        exif = bool(store.manifest.transform.get("exif"))
        return open_source(text, split=options["split"], clips=clips, exif=exif, **own)
    except VitseeError as error:
        raise VitseeError(
            f"the images of {store.label} cannot be read again: {error} (name where they "
            "are now with --data)"
        ) from None


@dataclass
class Classifiers:
    """Each found once. origin: where the weights are now; rebuilt: labels of the stores whose model
    was needed."""

    origin: Provenance
    rebuilt: list[str] = field(default_factory=list)
    _found: dict[str, Classifier | MissingInput] = field(default_factory=dict)

    def __call__(self, store: Store) -> Classifier:
        """The classifier that a store keeps, else its model's, built again; a MissingInput where
        neither can be had, with both reasons."""
        key = store.manifest.store_id
        if key not in self._found:
            try:
                self._found[key] = self._find(store)
            except MissingInput as missing:
                # Errors are kept too: a model that cannot be had is not loaded for each
                # question.
                self._found[key] = missing
        found = self._found[key]
        if isinstance(found, MissingInput):
            raise found
        return found

    def _find(self, store: Store) -> Classifier:
        try:
            return stored_classifier(store)
        except MissingInput as missing:
            kept = missing
        from vitsee_core.models.weights.classifier import (
            classifier_of,  # torch, with the model
        )

        try:
            model = model_of(store, self.origin.checkpoint, trust=self.origin.trust)
            found = classifier_of(model)
        except VitseeError as error:
            raise MissingInput(f"{kept}; {error}") from None
        if isinstance(found, str):
            raise NotOffered(f"{kept}; nor has its model one that can be read: {found}")
        self.rebuilt.append(store.label)
        log.info("%s: the classifier is that of its model, built again", store.label)
        return found
