"""Logit attribution: which sublayers, and which heads, write the model's answer?

The stream that the classifier reads is the embedding plus every residual branch. With the scale of
the final norm as it is for the image, all that follows is linear, so that each of these terms has
its own part of every logit (direct logit attribution: Elhage et al. 2021, "A mathematical framework
for transformer circuits"; of CLIP's image encoder Gandelsman et al. 2024)

    logit_c = sum over terms b of  W_c . (g * pool(b - mean(b)) / s)  +  (W_c . beta + bias_c)

with W and bias of the classifier, g and beta of the final norm, s the standard deviation that the
norm divides the image's stream by (of every token where it precedes the pooling; no centring in an
RMS norm, neither in a batch norm, whose s is its own). The last bracket is a part of its own,
`bias`.

Parts add up to the logits that the store has. What is missing, as activations are rounded, is the
part `residue`, and the largest of all images and classes, over the image's largest logit less the
classifier's bias, stands in the sidecar: below 1e-5 where the classifier reads the class token or
the mean over patches, which stores keep in float32, or where they were made with --dtype float32.

Logits are only defined up to a constant per image, which softmax does not see: every part is less
its mean over classes, unless `raw`. A direct part is no effect: what a sublayer writes also changes
what later ones do, and an ablation changes these, too.

With `heads`, the attention's part is divided once more: what each head gave, through its columns of
the output projection, and the projection's bias.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.logit_attribution.attribution_figure import draw_attributions
from vitsee_core.analyses.logit_attribution.contributions import (
    BIAS,
    HEAD,
    LOGIT,
    PROJECTION_BIAS,
    RESIDUE,
    WHOLE,
    Asked,
    Contributions,
    Key,
    Projection,
    ReadContributions,
    Readout,
)
from vitsee_core.analyses.logit_attribution.stream import (
    ResidualStream,
    residual_stream,
    tolerance_of,
)
from vitsee_core.labels.own_classes import why_not_own
from vitsee_core.models.classifiers import Classifiers
from vitsee_core.models.provenance import Provenance, model_of
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import FLOW, Gather, Offers, Option
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.moments import INTERVAL_METHOD, Summary
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.headlines import Answer, by_store, measured
from vitsee_core.tables.results import Table
from vitsee_stores.errors import MissingInput, SiteError, VitseeError
from vitsee_stores.manifest import few

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec, Store

log = logging.getLogger(__name__)

QUESTION = FLOW
HELP = """
Split logits into what each layer and head writes.

The residual branches, one by one, through the final norm (its scale as it is for the image) and
the classifier: direct logit attribution (Elhage et al. 2021; Gandelsman et al. 2024). The parts
add up to the logit of each image's label, less the mean over classes; what rounding leaves is a
row of its own. Stores need every branch, and for --heads what each head gave:

  $ vitsee extract vit_base_patch16_224 --data photos --sites blocks --sites head \\
      --sites residual --sites heads --tokens pooled -o b16.zarr

  $ vitsee logit-attribution b16.zarr -o parts.csv --png parts.png
  $ vitsee logit-attribution b16.zarr --heads --by-class -o heads.csv

--tokens pooled is enough where the classifier reads the class token, or normalises the mean over
patches. Not for models whose logits are no such sum: with an activation or a norm after the sum
(ResNet v1), an attention or maximum that pools, several classifiers, or layers behind the blocks.
"""
MEANING = {
    "site": "the sublayer; the stream's beginning; logits: the whole model",
    "class": "empty: each image's own",
    "part": "input, attn, mlp, token, channel, block; head, projection_bias; bias, residue, logit",
}
NEEDS = ("residual",)
READING = (
    "What each sublayer adds to the logit of the image's class, directly, with the final norm's "
    "scale held fixed: bars above 0 speak for the class, below 0 against it. The line is their "
    "running sum, which ends at the model's own logit. It says where the answer is written, not "
    "what it was made from: early layers act through later ones."
)
SOURCE = "Elhage et al. 2021; Gandelsman et al. 2024"
COLUMNS = (
    *(*SITE, "head", "class", "part"),
    *("metric", "value", "std", "low", "high", "n_images"),
)
METRIC = "logit"
LABEL, PREDICTED = "label", "predicted"


@analysis
def run(
    *stores: Store,
    heads: Annotated[
        bool, Option("Also each attention head, of extract --sites heads (loads the model).")
    ] = False,
    target: Annotated[
        str | None,
        Option(
            "Whose logit, of every image: its label's, or that of the class that the model "
            "predicts.",
            choices=(LABEL, PREDICTED),
            default="label; predicted without labels",
        ),
    ] = None,
    by_class: Annotated[bool, Option("Means over the images of each class.")] = False,
    classes: Annotated[
        Sequence[str],
        Option(
            "The logit of this class, by name or number, for every image in place of its own. "
            "Repeatable.",
            "--class",
            metavar="CLASS",
            default="each image's own",
        ),
    ] = (),
    raw: Annotated[bool, Option("Logits as they are, not less their mean over classes.")] = False,
    origin: Annotated[Provenance | None, Gather(Provenance, ("checkpoint", "trust"))] = None,
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs", replicates=False)
    ] = DEFAULT,
) -> Table:
    """One row per store, term of the stream (with `heads` also per head), and class asked for.

    Columns: `COLUMNS`; `value` in units of logits, mean over images. `part`: what the row is about:
    `input` (where the stream begins), the kind of sublayer, `head`, `projection_bias`, `bias`
    (of norm and classifier), `residue` (the logit less all parts but heads) and `logit`, as stored.
    An image without a label is left out where its label's logit is asked for.

    Memory: one site of a slab at a time.

    Args:
        stores: with all branches of the blocks that the classifier reads, and the classifier.
        origin: where the weights are now, of stores that keep no classifier, and for `heads`.

    Raises:
        MissingInput: no store has the branches or a classifier, or its logits are no such sum.
        SiteError: no such class.
        VitseeError: options that do not go together, or labels that are not the model's classes.
    """
    if classes and (by_class or target):
        raise VitseeError(
            "--class takes one class's logit of every image, "
            f"{'--by-class' if by_class else '--target'} each image's own: give one of them"
        )
    origin = origin or Provenance()
    classifiers = Classifiers(origin)
    selected = select_each(
        stores, ["blocks"], partial(_streams, classifiers=classifiers, execution=execution)
    )
    works = [
        _Store.of(store, stream, execution.rows(store), heads, target, by_class, classes, origin)
        for store, (stream,) in selected.members
    ]
    rows: list[dict[str, Any]] = []
    residue = {}
    with counting(execution.progress, sum(work.rows.n for work in works)):
        for work in works:
            own, residue[work.store.label] = work.table(raw, execution)
            rows += own
    notes = {
        "interval": INTERVAL_METHOD,
        "target": {work.store.label: work.target for work in works},
        "logits": "as they are" if raw else "less the mean over classes",
        "head": {work.store.label: work.stream.head.record() for work in works},
        "residue": {
            "what": "largest difference of logits and sums of parts over images and classes, over "
            "the image's largest logit less the classifier's bias",
            **residue,
        },
        "seed": execution.seed,
        "images": {work.store.label: work.rows.describe() for work in works},
        **selected.notes(),
    }
    return Table.from_rows(rows, COLUMNS, notes)


def plot(table: Table) -> Figure:
    """From the table alone; see `attribution_figure.draw_attributions`."""
    return draw_attributions(table)


def _streams(
    store: Store, _: Sequence[str], classifiers: Classifiers, execution: Execution
) -> list[ResidualStream]:
    return [residual_stream(store, classifiers(store), execution.rows(store))]


@dataclass(frozen=True)
class _Part:
    """A sublayer, or what belongs to the whole model, where rows name it."""

    name: str
    block: str | None
    depth: int
    rel_depth: float


@dataclass(frozen=True)
class _Store:
    """One store's rows. target: whose logit, in words."""

    store: Store
    stream: ResidualStream
    rows: Rows
    asked: Asked
    target: str
    projections: dict[str, Projection]

    @classmethod
    def of(
        cls,
        store: Store,
        stream: ResidualStream,
        rows: Rows,
        heads: bool,
        target: str | None,
        by_class: bool,
        classes: Sequence[str],
        origin: Provenance,
    ) -> _Store:
        remark = why_not_own(store, rows.mask & store.valid, stream.head.n_classes)
        if target == LABEL and remark:
            raise VitseeError(f"{remark}: no logit of a label; give --target {PREDICTED}")
        chosen = tuple(_class_number(store, stream.head.n_classes, text) for text in classes)
        if remark and target is None and not classes:
            log.info("%s: the logit of the class that it predicts", remark)
        predicted = bool(remark) or target == PREDICTED
        own = PREDICTED if predicted else LABEL
        asked = Asked(tuple(dict.fromkeys(chosen)), predicted, by_class)
        found = _projections(store, stream, origin) if heads else {}
        return cls(store, stream, rows, asked, "" if chosen else own, found)

    def table(self, raw: bool, execution: Execution) -> tuple[list[dict[str, Any]], Any]:
        """The rows, and what the sidecar says of the residue."""
        readout = Readout.of(self.stream.head)
        read = ReadContributions(self.stream, readout, self.asked, self.projections, raw)
        found, gap = execution.fold(
            self.store, partial(Contributions, read), self.rows, slab_bytes=self._slab_bytes()
        ).result()
        most = tolerance_of(self.store, self.stream)
        level = log.info if gap <= most else log.warning
        level("%s: the parts miss its logits by %.2g of the largest", self.store.label, gap)
        rows = [row for entry in self._entries() for row in self._rows(found, *entry)]
        return rows, {"largest": gap, "expected": most}

    def _slab_bytes(self) -> int:
        site = max(self.stream.terms, key=lambda site: int(np.prod(site.shape)))
        tokens = 1 if self.stream.head.pooled_kind else int(np.prod(site.shape)) // site.dim
        n = self.store.plan.slab
        return n * (4 * tokens * site.dim + 8 * 4 * (site.dim + self.stream.head.n_classes))

    def _entries(self) -> Iterator[tuple[Key, str, Any]]:
        """(key of the result, part, place) in the order of the rows."""
        base = self.stream.base
        yield (base.name, ""), "input", base
        for site in self.stream.branches:
            place = self._sublayer(site)
            kind = place.name.removeprefix(str(site.block)).removeprefix(".") or "block"
            yield (site.name, ""), kind, place
            if site.part == "attn.branch" and str(site.block) in self.projections:
                yield (site.name, HEAD), HEAD, place
                yield (site.name, PROJECTION_BIAS), PROJECTION_BIAS, place
        end = self.store.site(self.stream.head.site)
        whole = self.store.sites.get("logits") or _Part("logits", None, end.depth, 1.0)
        for part in (BIAS, RESIDUE, LOGIT):
            yield (WHOLE, part), part, whole

    def _sublayer(self, branch: SiteSpec) -> _Part:
        """The sublayer of a branch, with its index among all of the model."""
        name = branch.name.removesuffix(".branch")
        places = {at: (depth, rel) for at, depth, rel in self.store.plan.places}
        if name not in places:  # a store without dot products of skips and branches
            every = [s.name for s in self.store.sites.values() if s.name.endswith(".branch")]
            i = every.index(branch.name)
            return _Part(name, branch.block, i, i / max(len(every) - 1, 1))
        return _Part(name, branch.block, *places[name])

    def _rows(
        self, found: dict[Key, Summary], key: Key, part: str, place: Any
    ) -> Iterator[dict[str, Any]]:
        summary = found[key]
        about = site_columns(self.store, place) | {"part": part, "metric": METRIC}
        asked = self.asked
        several = asked.classes or (range(self.stream.head.n_classes) if asked.by_class else ())
        n_heads = summary.n.shape[-1] if part == HEAD else 0
        for head in range(n_heads) if n_heads else [None]:
            at_head = () if head is None else (head,)
            if not several:
                yield about | {"head": head} | summary.cells(at_head)
            for i, number in enumerate(several):
                if asked.classes or summary.n[(i, *at_head)]:
                    name = _class_name(self.store, self.stream.head.n_classes, number)
                    yield about | {"head": head, "class": name} | summary.cells((i, *at_head))


def _class_name(store: Store, n_classes: int, number: int) -> str:
    names = store.class_names or ()
    return names[number] if len(names) == n_classes else str(number)


def _class_number(store: Store, n_classes: int, text: str) -> int:
    """Raises SiteError: no such class."""
    names = list(store.class_names or ()) if len(store.class_names or ()) == n_classes else []
    if text in names:
        return names.index(text)
    if text.isdigit() and int(text) < n_classes:
        return int(text)
    expected = f"{few(names)} or a number" if names else "a number"
    raise SiteError(
        f"the classifier of {store.label} has no class {text!r}; expected {expected} from 0 to "
        f"{n_classes - 1}"
    )


def _projections(store: Store, stream: ResidualStream, origin: Provenance) -> dict[str, Projection]:
    """Block -> projection of its heads.

    Raises:
        MissingInput: the heads' outputs are not stored, or the model cannot be loaded again.
    """
    from vitsee_core.analyses.logit_attribution.projections import projections

    blocks = [str(site.block) for site in stream.branches if site.part == "attn.branch"]
    if not blocks:
        raise MissingInput(f"{store.label} has no attention among its branches: no --heads")
    for block in blocks:
        name = f"{block}.attn.heads"
        if name not in store.sites:
            raise MissingInput(
                f"{store.label} lacks {name}: extract with --sites blocks --sites head --sites "
                "residual --sites heads"
            )
        if stream.head.pooled_kind is None:
            store.acts(name)
    return projections(model_of(store, origin.checkpoint, trust=origin.trust), blocks)


def headline(table: Table) -> list[Answer]:
    """The sublayer that writes most, and how much of the logit the last third of them."""
    answers = []
    for store, rows in by_store(table, metric=METRIC, head=None, **{"class": None}):
        parts = rows["part"].astype(str)
        inner = ~np.isin(parts, ("input", HEAD, PROJECTION_BIAS, BIAS, RESIDUE, LOGIT))
        whole = rows["value"][parts == LOGIT].astype(float)
        own = rows.take(inner)
        if not len(own) or not len(whole):
            continue
        values = own["value"].astype(float)
        i = int(values.argmax())
        late = values[own["rel_depth"].astype(float) >= 2 / 3].sum()
        text = (
            f"of a logit of {whole[0]:.3g}, {own['site'][i]} writes most: {measured(own, i)}; the "
            f"last third of the sublayers {late:.3g}"
        )
        answers.append((store, text))
    return answers
