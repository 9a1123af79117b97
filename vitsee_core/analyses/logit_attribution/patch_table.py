"""The table of `vitsee logit-attribution --patches`: what single patches add, image by image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitsee_core.analyses.logit_attribution.contributions import (
    LOGIT,
    WHOLE,
    ReadContributions,
    Readout,
)
from vitsee_core.analyses.logit_attribution.explained_store import (
    METRIC,
    PREDICTED,
    ExplainedStore,
    class_name,
    projections_of,
)
from vitsee_core.analyses.logit_attribution.patch_parts import (
    PatchParts,
    of_own_tokens,
    one_image,
    through_attention,
)
from vitsee_core.analyses.logit_attribution.patch_sheet import TOTAL
from vitsee_core.models.provenance import Provenance
from vitsee_core.patch_maps.photos import Shown, describe_sheet, shown_rows
from vitsee_core.patch_maps.views import View, grid_sites
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.progress import counting
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.results import Table
from vitsee_core.types import Float
from vitsee_stores.errors import VitseeError

COLUMNS = (*SITE, "row", "col", "class", "image", "part", "metric", "value")
REST = "rest"  # of the logit: what the map has not


def patch_table(
    works: Sequence[ExplainedStore],
    names: Sequence[str],
    raw: bool,
    origin: Provenance,
    execution: Execution,
) -> Table:
    """A row per image, class, term and patch; then what they all give (`patches`), the rest of the
    logit, and the logit. The notes hold the photographs. names: of the images, by default the first
    four.

    Raises:
        MissingInput: tokens, or attention, are not stored.
        VitseeError: no such image, one without a label, images or weights that are gone.
    """
    rows: list[dict[str, Any]] = []
    shown: list[Shown] = []
    for work in works:
        store = work.store
        sites = grid_sites(store, [work.stream.head.site])
        picked = shown_rows(store, names, shown[0] if shown else None, execution)
        shown.append(Shown(store, View.of(store, sites), picked, sites))
        images = _Images(work, raw, picked)
        with counting(execution.progress, len(picked)):
            for one in images.parts(origin):
                rows += images.rows_of(one)
                execution.progress.advance(1)
    by_attention = {work.store.label: work.stream.head.pool == "cls" for work in works}
    notes = {
        "target": {work.store.label: work.target for work in works},
        "logits": "as they are" if raw else "less the mean over classes",
        "parts": {
            label: "moved by attention to the class token" if cls else "of the patch's own token"
            for label, cls in by_attention.items()
        },
        "sheet": describe_sheet(shown, origin.data),
    }
    return Table.from_rows(rows, COLUMNS, notes)


@dataclass
class _Images:
    """The images shown of one store."""

    work: ExplainedStore
    raw: bool
    picked: Sequence[int]

    def __post_init__(self) -> None:
        """Their logits, and the classes asked for, before any work."""
        work, store = self.work, self.work.store
        self.readout = Readout.of(work.stream.head)
        read = ReadContributions(work.stream, self.readout, work.asked, {}, self.raw)
        self.logits: dict[int, Float] = {}
        self.classes: dict[int, list[int]] = {}
        for row in self.picked:
            piece = one_image(store, row)
            logits = read.logits(piece)
            own = work.asked.own(piece, logits).tolist()
            self.classes[row] = list(work.asked.classes or own)
            if -1 in self.classes[row]:
                raise VitseeError(
                    f"{str(store.samples.id[row])!r} of {store.label} has no label; give --target "
                    f"{PREDICTED} or --class"
                )
            self.logits[row] = logits[0] - (0.0 if self.raw else logits.mean())

    def parts(self, origin: Provenance) -> Iterator[PatchParts]:
        """Each image's maps, by what the classifier reads."""
        store, stream = self.work.store, self.work.stream
        readout = self.readout if self.raw else self.readout.centred()
        if stream.head.pool != "cls":
            return of_own_tokens(store, stream, readout, self.classes)
        found = projections_of(store, stream, origin, stored=False)
        return through_attention(store, stream, readout, found, self.classes, origin)

    def rows_of(self, one: PatchParts) -> Iterator[dict[str, Any]]:
        """The rows of one image."""
        work, store = self.work, self.work.store
        head = work.stream.head
        layout = store.site(head.site).layout
        assert layout is not None and layout.grid is not None
        *inner, (_, _, whole) = work.entries()
        places = {site: (part, place) for (site, kind), part, place in inner if not kind}
        places[WHOLE] = (TOTAL, whole)
        total = one.total
        for c, number in enumerate(self.classes[one.row]):
            about = {
                "class": class_name(store, head.n_classes, number),
                "image": str(store.samples.id[one.row]),
                "metric": METRIC,
            }
            for site, values in [*one.maps.items(), (WHOLE, total)]:
                part, place = places[site]
                own = site_columns(store, place) | about | {"part": part}
                at = np.divmod(np.arange(values.shape[1]), layout.grid[1])
                for row, col, value in zip(*(x.tolist() for x in (*at, values[c])), strict=True):
                    yield own | {"row": row, "col": col, "value": value}
            own = site_columns(store, whole) | about
            logit = float(self.logits[one.row][number])
            yield own | {"part": REST, "value": logit - float(total[c].sum())}
            yield own | {"part": LOGIT, "value": logit}
