"""The rows of a store that the names of a ground truth mean."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.types import Integers
from vitsee_stores.errors import MissingInput

if TYPE_CHECKING:
    from vitsee_stores import Store


MAX_NAMES_SHOWN = 3
# What lists of crops add to an id: "#x0,y0,x1,y1".
_BOX = re.compile(r"#[-+\d.e]+(,[-+\d.e]+){3}$")


class RowsByName:
    """The rows of a store under the names that ground truths use.

    A name is a sample's id, its id without ending, or the last part of its path with or
    without ending; of these the first that exists counts. Boxes that lists of crops add to
    ids are ignored.
    """

    def __init__(self, store: Store, names: Iterable[str]) -> None:
        """Read the ids of a store's committed rows, for these names alone."""
        self._store = store
        wanted_names = {*names}
        # One dictionary per form of a name, in the order of precedence: name -> rows.
        self._rows_by_form: list[dict[str, list[int]]] = [{}, {}, {}, {}]
        committed = store.committed.repeat(store.plan.slab)
        for row, sample_id in enumerate(store.samples.id.tolist()):
            path = _BOX.sub("", sample_id)
            file = path.rpartition("/")[2]
            forms = (
                sample_id,
                os.path.splitext(path)[0],
                file,
                os.path.splitext(file)[0],
            )
            for rows_by_name, form in zip(self._rows_by_form, forms, strict=True):
                if form in wanted_names and committed[row]:
                    rows_by_name.setdefault(form, []).append(row)

    def _candidate_rows(self, name: str) -> list[int]:
        """Return the rows with a name, by the first form of names that has it."""
        for rows_by_name in self._rows_by_form:
            if name in rows_by_name:
                return rows_by_name[name]
        return []

    def existing_rows(self, names: Sequence[str]) -> Integers:
        """Return the rows of those names that exist, several of an ambiguous one."""
        rows = [row for name in names for row in self._candidate_rows(name)]
        return np.array(rows, np.int64)

    def require_rows(self, names: Sequence[str], what: str, source: str) -> Integers:
        """Return (names,) the row of each name.

        Args:
            names: names of images.
            what: "of the 70 queries", for messages.
            source: the ground truth, for messages.

        Raises:
            MissingInput: a name has no row, or several.
        """
        candidates = {name: self._candidate_rows(name) for name in names}
        missing = [name for name in names if not candidates[name]]
        if missing:
            first_id = self._store.samples.id[0]
            raise MissingInput(
                f"{self._store.label} lacks {len(missing)} {what} of {source} "
                f"({first_names(missing)}); its ids look like {first_id}"
            )
        for name, rows in candidates.items():
            if len(rows) > 1:
                ids = self._store.samples.id[rows].tolist()
                raise MissingInput(
                    f"{self._store.label} has {len(ids)} images that may be {name} of "
                    f"{source} "
                    f"({first_names(ids)}); expected one"
                )
        return np.array([candidates[name][0] for name in names], np.int64)


def first_names(names: Sequence[str]) -> str:
    """Return the first names as text, with "..." if there are more."""
    text = ", ".join(map(str, names[:MAX_NAMES_SHOWN]))
    return f"{text}, ..." if len(names) > MAX_NAMES_SHOWN else text
