"""One store of `vitsee logit-attribution`: the logits that are split, and the rows about them.

Projections turn the heads' outputs into their block's branch, and are taken from the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.analyses.logit_attribution.contributions import (
    BIAS,
    HEAD,
    LOGIT,
    PROJECTION_BIAS,
    RESIDUE,
    WHOLE_MODEL,
    Contributions,
    Key,
    Projection,
    ReadContributions,
    Readout,
    TargetClasses,
)
from vitsee_core.analyses.logit_attribution.residual_stream import (
    EXTRACT,
    ResidualStream,
    tolerance_of,
)
from vitsee_core.models.provenance import Provenance, model_of
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.moments import Summary
from vitsee_core.tables.columns import site_columns
from vitsee_core.truth.labels.labelled_rows import why_not_own
from vitsee_core.types import Float
from vitsee_stores.errors import MissingInput, NotOffered, SiteError, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitsee_core.models.loaded import LoadedModel
    from vitsee_stores import SiteSpec, Store

log = logging.getLogger(__name__)

METRIC = "logit"
LABEL = "label"
PREDICTED = "predicted"


@dataclass(frozen=True)
class Sublayer:
    """A sublayer or the whole model, which rows name in place of a site of the store.

    It has the attributes of a site that `site_columns` reads.
    """

    name: str
    block: str | None
    depth: int
    rel_depth: float


@dataclass(frozen=True)
class ExplainedStore:
    """One store whose logits are split.

    Attributes:
        store: the store.
        stream: the residual stream that its classifier reads.
        rows: the images whose logits are split.
        targets: the classes whose logits are explained.
        target: "label", "predicted", or "" if classes were named.
        projections: block -> projection of its heads; empty if heads are not explained.
    """

    store: Store
    stream: ResidualStream
    rows: Rows
    targets: TargetClasses
    target: str
    projections: dict[str, Projection]

    @classmethod
    def from_options(
        cls,
        store: Store,
        stream: ResidualStream,
        rows: Rows,
        *,
        heads: bool,
        target: str | None,
        by_class: bool,
        classes: Sequence[str],
        origin: Provenance,
    ) -> ExplainedStore:
        """Return the store with the classes that the options ask for.

        Args:
            store: the store.
            stream: the residual stream that its classifier reads.
            rows: the chosen rows.
            heads: whether the projections of the heads are needed.
            target: `LABEL`, `PREDICTED`, or None for the label if images have usable ones.
            by_class: values are counted by class.
            classes: names or numbers of classes.
            origin: where the model's weights are now.

        Raises:
            VitseeError: labels are asked for and are not the classifier's classes.
            SiteError: the classifier does not have a class.
            MissingInput: heads are asked for, and the store does not have their outputs.
        """
        n_classes = stream.head.n_classes
        no_label_reason = why_not_own(store, rows.mask & store.valid, n_classes)
        if target == LABEL and no_label_reason:
            raise VitseeError(
                f"{no_label_reason}: no logit of a label; give --target {PREDICTED}"
            )
        numbers = [class_number(store, n_classes, text) for text in classes]
        if no_label_reason and target is None and not classes:
            log.info("%s: the logit of the class that it predicts", no_label_reason)
        predicted = bool(no_label_reason) or target == PREDICTED
        target_word = PREDICTED if predicted else LABEL
        if numbers:
            target_word = ""
        return cls(
            store=store,
            stream=stream,
            rows=rows,
            targets=TargetClasses(tuple(dict.fromkeys(numbers)), predicted, by_class),
            target=target_word,
            projections=projections_of(store, stream, origin) if heads else {},
        )

    def table(self, raw: bool, execution: Execution) -> tuple[list[dict[str, Any]], Any]:
        """Return the store's rows, and the note about the residue.

        Logs by how much the parts miss the logits, as a warning if it is more than rounding.

        Args:
            raw: logits as they are, not less their mean over classes.
            execution: seed, jobs and memory.
        """
        readout = Readout.from_head(self.stream.head)
        read = ReadContributions(
            stream=self.stream,
            readout=readout,
            targets=self.targets,
            projections=self.projections,
            raw=raw,
        )
        summaries, gap = execution.fold(
            self.store,
            partial(Contributions, read),
            self.rows,
            slab_bytes=self._slab_bytes(),
        ).result()
        tolerance = tolerance_of(self.store, self.stream)
        level = logging.INFO if gap <= tolerance else logging.WARNING
        log.log(
            level,
            "%s: the parts miss its logits by %.2g of the largest",
            self.store.label,
            gap,
        )
        rows: list[dict[str, Any]] = []
        for entry in self.entries():
            rows += self._entry_rows(entry, summaries[entry.key])
        return rows, {"largest": gap, "expected": tolerance}

    def _slab_bytes(self) -> int:
        """Return the memory that a slab takes while it is read."""
        site = max(self.stream.terms, key=lambda site: int(np.prod(site.shape)))
        n_tokens = int(np.prod(site.shape)) // site.dim
        if self.stream.head.pooled_kind:
            n_tokens = 1
        # float32 tokens of the largest site; some float64 vectors and logits.
        token_bytes = 4 * n_tokens * site.dim
        vector_bytes = 8 * 4 * (site.dim + self.stream.head.n_classes)
        return self.store.plan.slab * (token_bytes + vector_bytes)

    def entries(self) -> Iterator[Entry]:
        """Yield the entries in the order of the rows; the last one is the logit."""
        base = self.stream.base
        yield Entry((base.name, ""), "input", base)
        for site in self.stream.branches:
            sublayer = self._sublayer(site)
            kind = sublayer.name.removeprefix(str(site.block)).removeprefix(".")
            yield Entry((site.name, ""), kind or "block", sublayer)
            if site.part == "attn.branch" and str(site.block) in self.projections:
                yield Entry((site.name, HEAD), HEAD, sublayer)
                yield Entry((site.name, PROJECTION_BIAS), PROJECTION_BIAS, sublayer)
        end = self.store.site(self.stream.head.site)
        model = self.store.sites.get("logits") or Sublayer("logits", None, end.depth, 1.0)
        for part in (BIAS, RESIDUE, LOGIT):
            yield Entry((WHOLE_MODEL, part), part, model)

    def _sublayer(self, branch: SiteSpec) -> Sublayer:
        """Return the sublayer of a branch, with its index among all sublayers of the model."""
        name = branch.name.removesuffix(".branch")
        for sublayer, depth, rel_depth in self.store.plan.places:
            if sublayer == name:
                return Sublayer(name, branch.block, depth, rel_depth)
        # The plan lists sublayers only if dot products of skips and branches are stored.
        branches = [
            site.name
            for site in self.store.sites.values()
            if site.name.endswith(".branch")
        ]
        depth = branches.index(branch.name)
        return Sublayer(name, branch.block, depth, depth / max(len(branches) - 1, 1))

    def _entry_rows(self, entry: Entry, summary: Summary) -> Iterator[dict[str, Any]]:
        """Yield the rows of an entry, by head and by class.

        Args:
            entry: what the rows are about.
            summary: moments of entries ([classes][, heads]).
        """
        n_classes = self.stream.head.n_classes
        classes: Sequence[int] = self.targets.classes
        if self.targets.by_class and not classes:
            classes = range(n_classes)
        heads: Sequence[int | None] = [None]
        if entry.part == HEAD:
            heads = range(summary.n.shape[-1])
        entry_cells = site_columns(self.store, entry.site)
        entry_cells.update(part=entry.part, metric=METRIC)
        # Entries of a summary are ([classes][, heads]): an index has what the entry has.
        for head in heads:
            head_index = () if head is None else (head,)
            if not classes:
                yield {**entry_cells, "head": head, **summary.cells(head_index)}
            for i, number in enumerate(classes):
                # By class, a class without images has no row.
                if self.targets.classes or summary.n[(i, *head_index)]:
                    name = class_name(self.store, n_classes, number)
                    cells = summary.cells((i, *head_index))
                    yield {**entry_cells, "head": head, "class": name, **cells}


class Entry(NamedTuple):
    """A term, whose rows of the table differ by head and class only.

    Attributes:
        key: key of its summary.
        part: the column `part`.
        site: the site or sublayer that the rows name.
    """

    key: Key
    part: str
    site: SiteSpec | Sublayer


def class_name(store: Store, n_classes: int, number: int) -> str:
    """Return the name of a class of the classifier, or its number if the store has no names."""
    names = store.class_names or ()
    if len(names) != n_classes:
        # Names of a data set's classes that are not those of the classifier.
        return str(number)
    return names[number]


def class_number(store: Store, n_classes: int, text: str) -> int:
    """Return the number of a class of the classifier from its name or number.

    Raises:
        SiteError: the classifier does not have this class.
    """
    names = list(store.class_names or ())
    if len(names) != n_classes:
        # Names of a data set's classes that are not those of the classifier.
        names = []
    if text in names:
        return names.index(text)
    if text.isdigit() and int(text) < n_classes:
        return int(text)
    expected = f"{abbreviate(names)} or a number" if names else "a number"
    raise SiteError(
        f"the classifier of {store.label} has no class {text!r}; expected {expected} "
        f"from 0 to {n_classes - 1}"
    )


def projections_of(
    store: Store, stream: ResidualStream, origin: Provenance, *, stored: bool = True
) -> dict[str, Projection]:
    """Load the store's model again and return block -> the projection of its heads.

    Args:
        store: the store.
        stream: the stream, among whose branches attention is looked for.
        origin: where the model's weights are now.
        stored: whether the heads' outputs have to be in the store.

    Raises:
        MissingInput: the heads' outputs are not stored, or the model cannot be loaded again.
        NotOffered: none of the branches is attention, or a projection is not linear.
    """
    blocks = [str(site.block) for site in stream.branches if site.part == "attn.branch"]
    if not blocks:
        option = "--by-head" if stored else "--patches of a class token"
        raise NotOffered(
            f"{store.label} has no attention among its branches: no {option}"
        )
    if stored:
        for block in blocks:
            name = f"{block}.attn.heads"
            if name not in store.sites:
                raise MissingInput(f"{store.label} lacks {name}: {EXTRACT} --sites heads")
            if stream.head.pooled_kind is None:
                # Raises MissingInput for a site that is stored pooled only.
                store.acts(name)
    model = model_of(store, origin.checkpoint, trust=origin.trust)
    return _proven_projections(model, blocks)


# Largest difference of a projection's output from the branch, relative to the branch's largest
# value: the error of float32 sums over some thousand channels.
PROJECTION_TOLERANCE = 1e-5


def _proven_projections(
    model: LoadedModel, blocks: Sequence[str]
) -> dict[str, Projection]:
    """Return block -> its projection, each proven on random images on the CPU.

    Raises:
        NotOffered: the branch is not a linear layer of the heads' outputs, times a factor per
            channel.
    """
    import torch
    from torch import nn

    from vitsee_core.models.capture import Capture, Observer
    from vitsee_core.models.site_tables import site_table
    from vitsee_core.models.survey.tracing import probe_images

    class TokenKeeper(Observer):
        """Keeps the tokens of each site by its part: (tokens of all images, dim), in float64."""

        def __init__(self) -> None:
            self.tokens: dict[str, Float] = {}

        def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
            """Keep a site's prefix tokens, if there are any, and its patches."""
            tokens = body.flatten(1, -2)
            if prefix is not None:
                tokens = torch.cat([prefix, tokens], 1)
            self.tokens[site.part] = tokens.flatten(0, 1).double().cpu().numpy()

    table = site_table(model)
    n_heads = {block.name: block.n_heads for block in table.attention}
    projections = {}
    for block in blocks:
        keeper = TokenKeeper()
        sites = [table[f"{block}.attn.heads"], table[f"{block}.attn.branch"]]
        with torch.inference_mode(), Capture(model, table, sites=sites) as capture:
            capture.run(probe_images(model.input_size, False), keeper)
        heads = keeper.tokens[sites[0].part]
        branch = keeper.tokens[sites[1].part]
        shape = (branch.shape[1], heads.shape[1])
        # The heads' outputs enter the projection, or a norm or an Identity before it: the linear
        # layer is looked for in the module around.
        entrance = table.heads[block].module
        attention_module = model.module.get_submodule(entrance.rpartition(".")[0])
        layers = [
            layer
            for layer in attention_module.modules()
            if isinstance(layer, nn.Linear) and layer.weight.shape == shape
        ]
        fits = (_fit_projection(layer, heads, branch, n_heads[block]) for layer in layers)
        projection = next((fit for fit in fits if fit is not None), None)
        if projection is None:
            raise NotOffered(
                f"{model.name}: the branch of {block}.attn is no linear layer of what "
                "the heads gave, times one factor per channel (a norm is between, say); "
                "leave out --by-head"
            )
        projections[block] = projection
    return projections


def _fit_projection(
    layer: nn.Linear, heads: Float, branch: Float, n_heads: int
) -> Projection | None:
    """Return the layer times a factor per channel, if that gives the branch; else None.

    The factor is 1 or the model's layer scale.

    Args:
        layer: a linear layer that may be the projection.
        heads: (tokens, heads x head dim) outputs of the heads, side by side.
        branch: (tokens, dim) the residual branch.
        n_heads: the number of heads.
    """
    weight = layer.weight.detach().double().numpy()
    bias = np.zeros(len(weight))
    if layer.bias is not None:
        bias = layer.bias.detach().double().numpy()
    output = heads @ weight.T + bias
    # Least squares for each channel by itself: factor = (o . b) / (o . o).
    squared_norm = np.square(output).sum(0)
    factor = (output * branch).sum(0) / np.where(squared_norm > 0, squared_norm, 1)
    error = np.abs(output * factor - branch).max()
    # Not `error > ...`: NaN has to be refused, too.
    if not error <= PROJECTION_TOLERANCE * np.abs(branch).max():
        return None
    return Projection(weight * factor[:, np.newaxis], bias * factor, n_heads)
