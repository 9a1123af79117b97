"""A model over its training: at each step a store is made and analysed.

The rows of all steps are one table per analysis.

    FOLDER/steps.csv              a row per step: how it ended, from which weights, at what cost
    FOLDER/results/attn-dist.csv  the analysis' own table, with the step in front
    FOLDER/stores/NAME-step1000.zarr
"""

from __future__ import annotations

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
from vitsee_core.study.steps import RESULTS, STORES
from vitsee_core.tables.files import check_output_path, write_files
from vitsee_core.tables.formats import table_bytes
from vitsee_core.tables.results import Table, read_result
from vitsee_core.tables.sidecars import describe_call, sidecar_bytes
from vitsee_core.tables.steps import RECORD
from vitsee_core.training.measurements import FIRST, PREVIOUS, Measurement
from vitsee_core.types import pl
from vitsee_stores import Store, open_store, remove_store
from vitsee_stores.errors import IdentityMismatch, VitseeError, reason
from vitsee_stores.manifest import abbreviate, jsonable

# How a step ended: values of the record's column `status`.
MEASURED = "measured"
DIVERGED = "diverged"
FAILED = "failed"
SKIPPED = "skipped"
# Values of `keep`.
TABLES = "tables"
EVERY_STORE = "stores"
KEEPS = (TABLES, EVERY_STORE)
# Classifiers learn from one vector per image: a store to train on keeps nothing else.
TRAIN_STORE_OPTIONS: dict[str, Any] = {
    "tokens": ("pooled",),
    "attention": "none",
    "residual": False,
}
# Options of the analysed stores that a store to train on does not take.
NOT_FOR_TRAIN = (
    "sites",
    *TRAIN_STORE_OPTIONS,
    "grams",
    "inputs",
    "erf",
    "images",
    "per_class",
    "only",
)
# Options that do not change numbers: a restart may choose others.
OF_THIS_PROCESS = ("device", "workers", "batch_size")


@dataclass
class StepTable:
    """A table with the rows of all steps until now, and what its sidecar needs.

    Attributes:
        frame: the rows.
        notes: notes for its sidecar.
        stores: entries of the steps' stores for its sidecar.
    """

    frame: pl.DataFrame
    notes: Mapping[str, Any]
    stores: list[dict[str, Any]] = field(default_factory=list)


class Series:
    """The measured steps of one model, in a folder.

    Args:
        folder: folder for tables and stores.
        data: images that are analysed at all steps, as for `vitsee extract --data`.
        analyses: analyses of every step.
        name: name of the model in tables and in names of stores.
        unit: what steps count, "step" or "epoch"; the first column of every table.
        train: images that classifiers learn from.
        train_images: number of images of `train` to use; None for all.
        keep: "tables" removes a store once its results are written, except stores that later
            ones are compared with; "stores" keeps all.
        resume: whether to go on in a folder that has steps.
        options: keywords of `vitsee.extract`.

    Raises:
        OptionError: an unknown value of `keep`.
        VitseeError: the folder has steps and `resume` is False, it has steps of other images
            or analyses, or something else; or it is inside a store or among the images.
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
        # Before anything is made: the folder may lie in a store or among the images.
        check_output_path(folder / RECORD, images=data)
        # stem of a table, or RECORD -> its rows
        self._results: dict[str, StepTable] = {}
        # Steps that all others are compared with, if they were chosen: FIRST, LAST -> step.
        self.ends: dict[str, int] = {}
        # What a restart must agree in is part of the record.
        lasting = {
            key: value
            for key, value in self.options.items()
            if key not in OF_THIS_PROCESS
        }
        self._notes: dict[str, Any] = {
            "unit": unit,
            "data": data,
            "train": train,
            "analyses": {
                measurement.stem: jsonable(measurement.options)
                for measurement in self.analyses
            },
            "options": jsonable(lasting),
        }
        if (folder / RECORD).exists():
            self._read_previous_steps(resume)
        else:
            tables = [self._table_path(measurement.stem) for measurement in self.analyses]
            existing = [str(path) for path in tables if path.exists()]
            if existing:
                raise VitseeError(
                    f"{abbreviate(existing)} would be replaced, and {folder} has no "
                    "record of steps; choose another folder"
                )
        try:
            (folder / STORES).mkdir(parents=True, exist_ok=True)
            (folder / RESULTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise VitseeError(
                f"cannot make the folder {folder}: {reason(error)}"
            ) from None

    def _read_previous_steps(self, resume: bool) -> None:
        """Read the record and tables of a folder that has steps.

        Raises:
            VitseeError: `resume` is False, or the steps are those of something else.
        """
        record_path = self.folder / RECORD
        record = read_result(record_path).table
        if not {self.unit, "status"} <= set(record.frame.columns):
            raise VitseeError(
                f"{record_path} is no record of a model's steps; choose another folder"
            )
        if not resume:
            raise VitseeError(
                f"{self.folder} has {len(record)} {self.unit}s of a model: give "
                "resume=True to go on with them after a restart, or choose another folder"
            )
        for key, value in self._notes.items():
            recorded = record.notes.get(key)
            if recorded != value:
                raise VitseeError(
                    f"{self.folder} was made with {key} {recorded!r}, now {value!r}; "
                    "choose another folder"
                )
        self._notes = dict(record.notes)
        self.ends = dict(record.notes.get("ends", {}))
        self._results[RECORD] = StepTable(record.frame, self._notes)
        for measurement in self.analyses:
            path = self._table_path(measurement.stem)
            if path.exists():
                result = read_result(path)
                self._results[measurement.stem] = StepTable(
                    frame=result.table.frame,
                    notes=result.table.notes,
                    stores=list(result.sidecar.get("stores", [])),
                )

    def _table_path(self, stem: str) -> Path:
        """Return the path of a table by its stem, or of the record by `RECORD`."""
        if stem == RECORD:
            return self.folder / RECORD
        return self.folder / RESULTS / f"{stem}.csv"

    def steps_of(self, status: str) -> list[int]:
        """Return the steps that ended with this status, ascending."""
        if RECORD not in self._results:
            return []
        rows = self._results[RECORD].frame.filter(status=status)
        steps: list[int] = rows[self.unit].to_list()
        return steps

    def store(self, step: int, images: str = "") -> Path:
        """Return the path of a step's store.

        Args:
            step: number of the step.
            images: "train" for the store that classifiers learn from, "" for the analysed one.
        """
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
        """Make the store of a step, analyse it, and write tables and record.

        Rows of the same step are replaced.

        Args:
            model: the model at this step, on the CPU; it is changed.
            step: number of the step.
            anew: whether to replace an existing store of this step.
            cells: function that returns further cells of the record, called at the end.

        Returns:
            The tables of this step by stem; and stem -> reason for analyses that failed.

        Raises:
            NotFinite: weights or activations are NaN or inf.
            VitseeError: extraction failed, or the images are not those of the first step.
        """
        # NaN weights would be measured without an error, as NaN in all tables.
        check_finite(model.module, model.name)
        store = self._extract_step(model, step, anew)
        train_store: Store | None = None
        if any(measurement.learns for measurement in self.analyses):
            train_store = self._extract_train(model, step)
        tables: dict[str, Table] = {}
        failed: dict[str, str] = {}
        for measurement in self.analyses:
            # Analyses take the store to learn from, or to compare with, in front.
            stores = [store]
            if measurement.learns and train_store is not None:
                stores.insert(0, train_store)
            try:
                if measurement.against:
                    reference = self._reference(measurement.against, step)
                    if reference is None:
                        continue
                    stores.insert(0, reference)
                tables[measurement.stem] = measurement.run(*stores, **measurement.options)
            except VitseeError as error:
                # The other analyses of the step run all the same.
                failed[measurement.stem] = str(error)
        for stem, table in tables.items():
            rows = table.written.insert_column(0, pl.lit(step).alias(self.unit))
            provenance: Mapping[str, Any] = {}
            if table.made_by is not None:
                provenance = describe_call(*table.made_by)
            notes = {**table.notes, "unit": self.unit}
            self._replace_rows(stem, step, Table(rows, notes), provenance)
        note = "; ".join(f"{stem}: {why}" for stem, why in failed.items())
        weights = str(model.weights.get("sha256", ""))[:8]
        status = MEASURED if tables or not failed else FAILED
        self.record(step, status, note, weights=weights, **cells())
        if train_store is not None and self.keep != EVERY_STORE:
            remove_store(train_store.place)
        self._tidy(step)
        return tables, failed

    def make(self, model: LoadedModel, step: int) -> None:
        """Make a step's store alone, for others to be compared with.

        Raises:
            NotFinite: weights or activations are NaN or inf.
            VitseeError: extraction failed, or the images are not those of the first step.
        """
        check_finite(model.module, model.name)
        self._extract_step(model, step, anew=False)

    def _extract_step(self, model: LoadedModel, step: int, anew: bool) -> Store:
        """Make the store of a step and return it.

        An existing store of the same weights is completed, unless `anew`.

        Raises:
            VitseeError: extraction failed, or the images are not those of the first step.
        """
        path = self.store(step)
        try:
            store = extract(model, self.data, path, force=anew, **self.options)
        except IdentityMismatch:  # of other weights
            store = extract(model, self.data, path, force=True, **self.options)
        fingerprint = store.manifest.samples_fingerprint
        first_fingerprint = self._notes.setdefault("samples_fingerprint", fingerprint)
        if first_fingerprint != fingerprint:
            raise VitseeError(
                f"{self.data} has other images now than at the first {self.unit} "
                f"(fingerprint {fingerprint[:8]}, then {first_fingerprint[:8]}); values "
                "of other images are not compared"
            )
        return store

    def _extract_train(self, model: LoadedModel, step: int) -> Store:
        """Make the store that a step's classifiers learn from, and return it."""
        assert self.train is not None
        options = {
            key: value for key, value in self.options.items() if key not in NOT_FOR_TRAIN
        }
        if self.train_images is not None:
            options["images"] = self.train_images
        path = self.store(step, "train")
        return extract(
            model, self.train, path, force=True, **options, **TRAIN_STORE_OPTIONS
        )

    def keep_as(self, against: str, step: int) -> None:
        """Have every step compared with this one, in this call and later ones."""
        self.ends[against] = step
        self._notes["ends"] = dict(self.ends)

    def is_done(self, step: int, cells: Mapping[str, Any]) -> bool:
        """Return whether this step was measured, or diverged, with these cells in its row."""
        if RECORD not in self._results:
            return False
        frame = self._results[RECORD].frame.filter(pl.col(self.unit) == step)
        rows: list[dict[str, Any]] = frame.to_dicts()
        return any(
            row["status"] in (MEASURED, DIVERGED)
            and all(row.get(key) == value for key, value in cells.items())
            for row in rows
        )

    def _reference(self, against: str, step: int) -> Store | None:
        """Return the store that a step's store is compared with.

        It is None if the step itself is the reference, or if that was never made.

        Raises:
            StoreError: the store was removed.
        """
        earlier = [measured for measured in self.steps_of(MEASURED) if measured < step]
        reference_step = self._reference_steps(earlier).get(against)
        if reference_step is None or reference_step == step:
            return None
        return open_store(self.store(reference_step))

    def _reference_steps(self, steps: Sequence[int]) -> dict[str, int | None]:
        """Return which of these measured steps others are compared with, by reference word."""
        by_order = {FIRST: min(steps, default=None), PREVIOUS: max(steps, default=None)}
        return {**by_order, **self.ends}

    def _tidy(self, step: int) -> None:
        """Remove the stores that are not kept and that no later step is compared with."""
        if self.keep == EVERY_STORE:
            return
        measured = self.steps_of(MEASURED)
        references = self._reference_steps(measured)
        needed = {
            references.get(measurement.against)
            for measurement in self.analyses
            if measurement.against
        }
        # The step itself need not have been measured.
        for unneeded in {*measured, step} - needed:
            self._remove(unneeded)

    def record(self, step: int, status: str, note: str = "", **cells: Any) -> None:
        """Write how a step ended into the record."""
        row = {self.unit: step, "status": status, "note": note, "weights": "", **cells}
        self._replace_rows(RECORD, step, Table.from_rows([row], notes=self._notes), {})

    def drop_from(self, step: int) -> list[int]:
        """Remove the rows and stores of this step and all later ones.

        Returns:
            Those of these steps that were measured.
        """
        # Also from the record, so that the folder is as if the steps had never been.
        dropped = [measured for measured in self.steps_of(MEASURED) if measured >= step]
        labels = {self.store(dropped_step).stem for dropped_step in dropped}
        for result in self._results.values():
            result.frame = result.frame.filter(pl.col(self.unit) < step)
            result.stores = [
                entry for entry in result.stores if entry.get("label") not in labels
            ]
        for dropped_step in dropped:
            self._remove(dropped_step)
        return dropped

    def _remove(self, step: int) -> None:
        """Remove a step's store, and the Gram cache beside it."""
        path = self.store(step)
        if path.exists():
            remove_store(path)
        # An analysis may have cached its Gram matrices there.
        shutil.rmtree(path.with_name(f"{path.name}.grams"), ignore_errors=True)

    def _replace_rows(
        self, stem: str, step: int, table: Table, provenance: Mapping[str, Any]
    ) -> None:
        """Replace the rows of a step in a table, and write the table with its sidecar.

        Args:
            stem: stem of the table, or `RECORD`.
            step: the step.
            table: its new rows.
            provenance: entries of the sidecar that say how they were made.
        """
        previous = self._results.get(stem)
        frame = table.written
        stores = list(provenance.get("stores", []))
        if previous is not None:
            other_steps = previous.frame.filter(pl.col(self.unit) != step)
            frame = Table.concat([other_steps, frame]).frame.sort(
                self.unit, maintain_order=True
            )
            labels = {entry.get("label") for entry in stores}
            other_stores = [
                entry for entry in previous.stores if entry.get("label") not in labels
            ]
            stores = other_stores + stores
        self._results[stem] = StepTable(frame, table.notes, stores)
        path = self._table_path(stem)
        # The sidecar has the digest of the table's bytes.
        data = table_bytes(frame, ".csv")
        sidecar = sidecar_bytes(
            frame, table.notes, {**provenance, "stores": stores}, data
        )
        write_files(
            {path.with_name(f"{path.name}.json"): sidecar, path: data}, force=True
        )


def check_finite(module: nn.Module, name: str) -> None:
    """Raise NotFinite if a weight or buffer of a model is NaN or inf; names them."""
    # Counters of batches are integers, and always finite.
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
    """Context in which remarks are not logged, as the first measurement logged them.

    Args:
        quiet: whether this is a later measurement.
    """
    logger = logging.getLogger("vitsee_core")
    level = logger.level
    # Debugging shows all.
    if quiet and logger.getEffectiveLevel() > logging.DEBUG:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
