"""A model over its training: at each step a store is made and analysed, and the rows of all steps
are one table per analysis.

    FOLDER/steps.csv              a row per step: how it ended, from which weights, at what cost
    FOLDER/results/attn-dist.csv  the analysis' own table, with the step in front
    FOLDER/stores/NAME-step1000.zarr
"""

from __future__ import annotations

import inspect
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from vitsee_core.extraction.keywords import extract
from vitsee_core.extraction.options import OptionError
from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.selfcheck import NotFinite
from vitsee_core.runtime import registry
from vitsee_core.study.steps import RESULTS, STORES
from vitsee_core.tables.files import check_place, write_files
from vitsee_core.tables.formats import table_bytes
from vitsee_core.tables.headlines import SETTINGS
from vitsee_core.tables.results import Table, read_result
from vitsee_core.tables.sidecars import describe_call, sidecar_bytes
from vitsee_core.tables.steps import RECORD
from vitsee_core.types import pl
from vitsee_stores import Store, open_store, remove_store
from vitsee_stores.errors import IdentityMismatch, VitseeError, reason
from vitsee_stores.manifest import abbreviate, jsonable

FIRST = "first"
LAST = "last"
PREVIOUS = "previous"
MEASURED = "measured"
DIVERGED = "diverged"
FAILED = "failed"
SKIPPED = "skipped"
TABLES = "tables"
EVERY_STORE = "stores"
KEEPS = (TABLES, EVERY_STORE)
# Classifiers learn from one vector per image: a store to train on keeps nothing else.
OF_TRAIN: dict[str, Any] = {"tokens": ("pooled",), "attention": "none", "residual": False}


OF_THIS_PROCESS = (
    "device",
    "workers",
    "batch_size",
)  # options that do not change numbers


@dataclass(frozen=True)
class Measurement:
    """An analysis of every step.

    Attributes:
        stem: of its table.
        run: of its module.
        options: its keywords.
        against: the step whose store is compared with each other's: `FIRST`, `LAST`, `PREVIOUS`, or
            "" for an analysis of one store.
        learns: it trains on the images to train on.
    """

    stem: str
    run: Callable[..., Table]
    options: Mapping[str, Any]
    against: str = ""
    learns: bool = False


def measurements(
    analyses: Sequence[str] | Mapping[str, Mapping[str, Any]],
    references: Sequence[str],
    *,
    with_train: bool,
) -> list[Measurement]:
    """The analyses of these names, `attn-dist` or `attn_dist`; `cka:first` for one of two stores,
    that of the first step and each other's.

    Args:
        analyses: names, or name -> keywords of the analysis.
        references: the words allowed after the colon.
        with_train: whether there are images to train on.

    Raises:
        OptionError: no such analysis, one that does not take one store, no such keyword, or one
            that trains, without images for it.
    """
    given = analyses if isinstance(analyses, Mapping) else {name: {} for name in analyses}
    if isinstance(analyses, str) or not given:
        raise OptionError(
            f"analyses are {analyses!r}; expected a list of names of commands"
        )
    return [
        _measurement(name, dict(options), references, with_train)
        for name, options in given.items()
    ]


def _measurement(
    name: str, options: dict[str, Any], references: Sequence[str], with_train: bool
) -> Measurement:
    command, colon, against = name.replace("_", "-").partition(":")
    analysis = command.replace("-", "_")
    if analysis not in registry.names():
        raise OptionError(f"no analysis {command!r}; expected the name of a command")
    run = registry.load(analysis).run
    parameters = inspect.signature(run).parameters
    learns = "train" in parameters
    if unknown := [key for key in options if key not in parameters]:
        raise OptionError(
            f"{command} has no keyword {unknown[0]!r}; it has {', '.join(parameters)}"
        )
    if colon and against not in references:
        raise OptionError(
            f"{name!r}; expected {command}, or with : one of {', '.join(references)}"
        )
    if colon and "pairs" in parameters:
        options.setdefault("pairs", "same-depth")
    if learns and not with_train:
        raise OptionError(
            f"{command} learns from images: give train=, others of the same classes"
        )
    stem = f"{command}-{against}" if colon else command
    return Measurement(stem, run, options, against, learns)


@dataclass
class Result:
    """The rows of all steps until now, notes, and the entries of their stores in the sidecar."""

    frame: pl.DataFrame
    notes: Mapping[str, Any]
    stores: list[dict[str, Any]] = field(default_factory=list)


class Series:
    """The steps of one model, in a folder.

    Args:
        folder: for tables and stores.
        data: the images, as for `vitsee extract --data`; of all steps.
        analyses: of every step.
        name: of the model in tables and names of stores.
        unit: what steps count, the column of every table: "step", "epoch".
        train: images that classifiers learn from; train_images: how many of them.
        keep: "tables" removes a store once its results are there, but for those that later ones
            are compared with; "stores" keeps all.
        resume: go on in a folder that has steps.
        options: of `vitsee.extract`.

    Raises:
        OptionError: an unknown value of `keep`.
        VitseeError: the folder has steps and `resume` is off, steps of other images or analyses, or
            something else; it is inside a store or among the images.
    """

    def __init__(
        self,
        folder: Path,
        data: str,
        analyses: Sequence[Measurement],
        *,
        name: str,
        unit: str = "step",
        train: str | None = None,
        train_images: int | None = None,
        keep: str = TABLES,
        resume: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if keep not in KEEPS:
            raise OptionError(f"keep is {keep!r}; expected {' or '.join(KEEPS)}")
        self.folder = folder
        self.data = data
        self.analyses = list(analyses)
        self.name = name
        self.unit = unit
        self.keep = keep
        self.train = train
        self.train_images = train_images
        self.options = dict(options or {})
        check_place(folder / RECORD, images=data)
        self._results: dict[str, Result] = {}
        # Steps that all others are compared with, where they are chosen: `FIRST`, `LAST`.
        self.ends: dict[str, int] = {}
        lasting = {k: v for k, v in self.options.items() if k not in OF_THIS_PROCESS}
        self._notes: dict[str, Any] = {
            "unit": unit,
            "data": data,
            "train": train,
            "analyses": {one.stem: jsonable(one.options) for one in self.analyses},
            "options": jsonable(lasting),
        }
        if (folder / RECORD).exists():
            self._go_on(resume)
        elif there := [
            str(path) for one in self.analyses if (path := self._place(one.stem)).exists()
        ]:
            raise VitseeError(
                f"{abbreviate(there)} would be replaced, and {folder} has no record of "
                "steps; choose "
                "another folder"
            )
        try:
            for part in (STORES, RESULTS):
                (folder / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise VitseeError(
                f"cannot make the folder {folder}: {reason(error)}"
            ) from None

    def _go_on(self, resume: bool) -> None:
        """Read what is there. Raises VitseeError: it is not wanted, or something else."""
        record = self.folder / RECORD
        before = read_result(record)
        if not {self.unit, "status"} <= set(before.table.frame.columns):
            raise VitseeError(
                f"{record} is no record of a model's steps; choose another folder"
            )
        if not resume:
            raise VitseeError(
                f"{self.folder} has {len(before.table)} {self.unit}s of a model: give resume=True "
                "to go on with them after a restart, or choose another folder"
            )
        for key, value in self._notes.items():
            if (found := before.table.notes.get(key)) != value:
                raise VitseeError(
                    f"{self.folder} was made with {key} {found!r}, now {value!r}; choose another "
                    "folder"
                )
        self._notes = dict(before.table.notes)
        self.ends = dict(before.table.notes.get("ends", {}))
        self._results[RECORD] = Result(before.table.frame, self._notes)
        for one in self.analyses:
            path = self._place(one.stem)
            if path.exists():
                own = read_result(path)
                stores = list(own.sidecar.get("stores", []))
                self._results[one.stem] = Result(own.table.frame, own.table.notes, stores)

    def _place(self, stem: str) -> Path:
        return self.folder / (stem if stem == RECORD else f"{RESULTS}/{stem}.csv")

    def steps_of(self, status: str) -> list[int]:
        """The steps that ended so, ascending."""
        if RECORD not in self._results:
            return []
        found: list[int] = (
            self._results[RECORD].frame.filter(status=status)[self.unit].to_list()
        )
        return found

    def store(self, step: int, images: str = "") -> Path:
        """Path of a step's store; images: "train", or those that are analysed."""
        suffix = f"-{images}" if images else ""
        return self.folder / STORES / f"{self.name}-{self.unit}{step}{suffix}.zarr"

    def measure(
        self,
        model: LoadedModel,
        step: int,
        *,
        anew: bool = True,
        cells: Callable[[], Mapping[str, Any]] = dict,
    ) -> tuple[dict[str, Table], dict[str, str]]:
        """Make the store of a step, analyse it, and write tables and record; rows of the same step
        are replaced.

        Args:
            model: on the CPU; it is changed.
            step: its number.
            anew: replace a store of this step that is there.
            cells: gives more cells of the record, when all is done.

        Returns:
            The tables of this step, and for the analyses that failed the reason.

        Raises:
            NotFinite: weights or activations are NaN or inf.
            VitseeError: extraction failed, or the images are others than those of the first step.
        """
        check_finite(model.module, model.name)
        store = self._extracted(model, step, anew)
        train: Store | None = None
        if any(one.learns for one in self.analyses):
            n = self.train_images
            images: dict[str, Any] = {} if n is None else {"images": n}
            own = {
                k: v
                for k, v in self.options.items()
                if k
                not in (
                    "sites",
                    *OF_TRAIN,
                    "grams",
                    "inputs",
                    "erf",
                    "images",
                    "per_class",
                    "only",
                )
            }
            place = self.store(step, "train")
            assert self.train is not None
            train = extract(
                model, self.train, place, force=True, **own, **OF_TRAIN, **images
            )
        tables: dict[str, Table] = {}
        failed: dict[str, str] = {}
        for one in self.analyses:
            try:
                other = self._reference(one.against, step) if one.against else None
                if one.against and other is None:
                    continue
                stores = [
                    s
                    for s in (other, train if one.learns else None, store)
                    if s is not None
                ]
                tables[one.stem] = one.run(*stores, **one.options)
            except VitseeError as error:
                failed[one.stem] = str(error)
        for stem, table in tables.items():
            rows = table.written.insert_column(0, pl.lit(step).alias(self.unit))
            given = describe_call(*table.made_by) if table.made_by is not None else {}
            self._put(stem, step, Table(rows, {**table.notes, "unit": self.unit}), given)
        note = "; ".join(f"{stem}: {why}" for stem, why in failed.items())
        weights = str(model.weights.get("sha256", ""))[:8]
        status = MEASURED if tables or not failed else FAILED
        self.record(step, status, note, weights=weights, **cells())
        if train is not None and self.keep != EVERY_STORE:
            remove_store(train.place)
        self._tidy(step)
        return tables, failed

    def make(self, model: LoadedModel, step: int) -> None:
        """Make a step's store alone, for others to be compared with. Raises VitseeError: as
        `measure`."""
        check_finite(model.module, model.name)
        self._extracted(model, step, anew=False)

    def _extracted(self, model: LoadedModel, step: int, anew: bool) -> Store:
        """The step's store; of what is there of the same weights it is completed unless `anew`.
        Raises VitseeError: see `measure`."""
        place = self.store(step)
        try:
            store = extract(model, self.data, place, force=anew, **self.options)
        except IdentityMismatch:
            store = extract(model, self.data, place, force=True, **self.options)
        fingerprint = store.manifest.samples_fingerprint
        if (
            first := self._notes.setdefault("samples_fingerprint", fingerprint)
        ) != fingerprint:
            raise VitseeError(
                f"{self.data} has other images now than at the first {self.unit} (fingerprint "
                f"{fingerprint[:8]}, then {first[:8]}); values of other images are not compared"
            )
        return store

    def keep_as(self, against: str, step: int) -> None:
        """Have every step compared with this one, in this call and later ones."""
        self.ends[against] = step
        self._notes["ends"] = dict(self.ends)

    def is_done(self, step: int, cells: Mapping[str, Any]) -> bool:
        """Whether this step was measured, or diverged, with these cells in its row."""
        if RECORD not in self._results:
            return False
        rows = self._results[RECORD].frame.filter(pl.col(self.unit) == step)
        found: list[dict[str, Any]] = rows.to_dicts()
        return any(
            row["status"] in (MEASURED, DIVERGED)
            and all(row.get(k) == v for k, v in cells.items())
            for row in found
        )

    def _reference(self, against: str, step: int) -> Store | None:
        """The store that a step's is compared with; None if it is its own, or was never made.
        Raises StoreError: it is gone."""
        chosen = self._ends([one for one in self.steps_of(MEASURED) if one < step]).get(
            against
        )
        if chosen is None or chosen == step:
            return None
        return open_store(self.store(chosen))

    def _ends(self, steps: Sequence[int]) -> dict[str, int | None]:
        """The steps that others are compared with, of these that were measured."""
        own = {FIRST: min(steps, default=None), PREVIOUS: max(steps, default=None)}
        return own | self.ends

    def _tidy(self, step: int) -> None:
        """Remove the stores that are not kept and that no later step is compared with."""
        if self.keep == EVERY_STORE:
            return
        done = self.steps_of(MEASURED)
        ends = self._ends(done)
        kept = {ends.get(one.against) for one in self.analyses if one.against}
        for one in {*done, step} - kept:
            self._remove(one)

    def record(self, step: int, status: str, note: str = "", **cells: Any) -> None:
        """Write how a step ended into the record."""
        row = {self.unit: step, "status": status, "note": note, "weights": "", **cells}
        self._put(RECORD, step, Table.from_rows([row], notes=self._notes), {})

    def drop_from(self, step: int) -> list[int]:
        """Remove the rows and stores of this step and all later ones; returns those that were
        measured."""
        gone = [one for one in self.steps_of(MEASURED) if one >= step]
        labels = {self.store(one).stem for one in gone}
        for result in self._results.values():
            result.frame = result.frame.filter(pl.col(self.unit) < step)
            result.stores = [
                entry for entry in result.stores if entry.get("label") not in labels
            ]
        for one in gone:
            self._remove(one)
        return gone

    def _remove(self, step: int) -> None:
        """Remove a step's store, and what was kept of it beside it."""
        place = self.store(step)
        if place.exists():
            remove_store(place)
        shutil.rmtree(place.with_name(f"{place.name}.grams"), ignore_errors=True)

    def _put(self, stem: str, step: int, own: Table, given: Mapping[str, Any]) -> None:
        """Replace the rows of a step, and write the table. given: see `describe_run`."""
        before = self._results.get(stem)
        frame = own.written
        stores = list(given.get("stores", []))
        if before is not None:
            others = before.frame.filter(pl.col(self.unit) != step)
            frame = Table.concat([others, frame]).frame.sort(
                self.unit, maintain_order=True
            )
            labels = {entry.get("label") for entry in stores}
            stores = [s for s in before.stores if s.get("label") not in labels] + stores
        self._results[stem] = Result(frame, own.notes, stores)
        path = self._place(stem)
        data = table_bytes(frame, ".csv")
        sidecar = sidecar_bytes(frame, own.notes, {**given, "stores": stores}, data)
        write_files(
            {path.with_name(f"{path.name}.json"): sidecar, path: data}, force=True
        )


def check_finite(module: nn.Module, name: str) -> None:
    """Raise NotFinite if a weight or buffer of a model is NaN or inf: names them."""
    tensors = [
        (key, x) for key, x in module.state_dict().items() if x.is_floating_point()
    ]
    broken = [key for key, x in tensors if not bool(x.isfinite().all())]
    if broken:
        raise NotFinite(
            f"{name} has NaN or inf in {len(broken)} of {len(tensors)} weights: "
            f"{abbreviate(broken)}"
        )


@contextmanager
def without_remarks(quiet: bool) -> Iterator[None]:
    """Context in which remarks, which the first measurement made, are not made again."""
    logger = logging.getLogger("vitsee_core")
    level = logger.level
    if quiet and logger.getEffectiveLevel() > logging.DEBUG:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def scalars(stem: str, table: Table) -> dict[str, float]:
    """`STEM/METRIC/SITE` -> the mean of its rows that have a value, over heads and classes; two
    sites that differ are both named, and settings (k, shots, tokens) where they vary. Rows of
    baselines are left out."""
    frame = table.written
    for name in ("site", "site_a", "site_b", "baseline", *SETTINGS):
        if name not in frame.columns:
            frame = frame.with_columns(pl.lit(None, pl.String).alias(name))
    settings = [name for name in SETTINGS if frame[name].n_unique() > 1]
    sites = ("site", "site_a", "site_b")
    rows = frame.filter(pl.col("value").is_finite(), pl.col("baseline").is_null())
    means = rows.group_by("metric", *sites, *settings, maintain_order=True).agg(
        pl.col("value").mean()
    )
    found = {}
    for row in means.iter_rows(named=True):
        site = " ~ ".join(
            dict.fromkeys(str(row[name]) for name in sites if row[name] is not None)
        )
        parts = [stem, row["metric"], site, *(f"{name}={row[name]}" for name in settings)]
        found["/".join(part for part in parts if part)] = float(row["value"])
    return found
