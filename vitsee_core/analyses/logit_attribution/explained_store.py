"""One store of `vitsee logit-attribution`: whose logits are split, the rows about them, and the
projections, taken from its model, that turn the heads' outputs into their block's branch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.logit_attribution.contributions import (
    BIAS,
    HEAD,
    LOGIT,
    PROJECTION_BIAS,
    RESIDUE,
    WHOLE,
    Contributions,
    Key,
    Projection,
    ReadContributions,
    Readout,
    ResidualStream,
    TargetClasses,
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
class _Part:
    """A sublayer, or what belongs to the whole model, where rows name it."""

    name: str
    block: str | None
    depth: int
    rel_depth: float


@dataclass(frozen=True)
class ExplainedStore:
    """One store's rows. target: whose logit, in words."""

    store: Store
    stream: ResidualStream
    rows: Rows
    asked: TargetClasses
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
    ) -> ExplainedStore:
        remark = why_not_own(store, rows.mask & store.valid, stream.head.n_classes)
        if target == LABEL and remark:
            raise VitseeError(f"{remark}: no logit of a label; give --target {PREDICTED}")
        chosen = tuple(
            class_number(store, stream.head.n_classes, text) for text in classes
        )
        if remark and target is None and not classes:
            log.info("%s: the logit of the class that it predicts", remark)
        predicted = bool(remark) or target == PREDICTED
        own = PREDICTED if predicted else LABEL
        asked = TargetClasses(tuple(dict.fromkeys(chosen)), predicted, by_class)
        found = projections_of(store, stream, origin) if heads else {}
        return cls(store, stream, rows, asked, "" if chosen else own, found)

    def table(self, raw: bool, execution: Execution) -> tuple[list[dict[str, Any]], Any]:
        """The rows, and what the sidecar says of the residue."""
        readout = Readout.of(self.stream.head)
        read = ReadContributions(self.stream, readout, self.asked, self.projections, raw)
        found, gap = execution.fold(
            self.store,
            partial(Contributions, read),
            self.rows,
            slab_bytes=self._slab_bytes(),
        ).result()
        most = tolerance_of(self.store, self.stream)
        level = log.info if gap <= most else log.warning
        level(
            "%s: the parts miss its logits by %.2g of the largest", self.store.label, gap
        )
        rows = [row for entry in self.entries() for row in self._rows(found, *entry)]
        return rows, {"largest": gap, "expected": most}

    def _slab_bytes(self) -> int:
        site = max(self.stream.terms, key=lambda site: int(np.prod(site.shape)))
        tokens = (
            1 if self.stream.head.pooled_kind else int(np.prod(site.shape)) // site.dim
        )
        n = self.store.plan.slab
        return n * (
            4 * tokens * site.dim + 8 * 4 * (site.dim + self.stream.head.n_classes)
        )

    def entries(self) -> Iterator[tuple[Key, str, Any]]:
        """(key of the result, part, place) in the order of the rows; the last is the logit."""
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
            every = [
                s.name for s in self.store.sites.values() if s.name.endswith(".branch")
            ]
            i = every.index(branch.name)
            return _Part(name, branch.block, i, i / max(len(every) - 1, 1))
        return _Part(name, branch.block, *places[name])

    def _rows(
        self, found: dict[Key, Summary], key: Key, part: str, place: Any
    ) -> Iterator[dict[str, Any]]:
        summary = found[key]
        about = site_columns(self.store, place) | {"part": part, "metric": METRIC}
        asked = self.asked
        several = asked.classes or (
            range(self.stream.head.n_classes) if asked.by_class else ()
        )
        n_heads = summary.n.shape[-1] if part == HEAD else 0
        for head in range(n_heads) if n_heads else [None]:
            at_head = () if head is None else (head,)
            if not several:
                yield about | {"head": head} | summary.cells(at_head)
            for i, number in enumerate(several):
                if asked.classes or summary.n[(i, *at_head)]:
                    name = class_name(self.store, self.stream.head.n_classes, number)
                    yield (
                        about
                        | {"head": head, "class": name}
                        | summary.cells((i, *at_head))
                    )


def class_name(store: Store, n_classes: int, number: int) -> str:
    """A class of the classifier in rows."""
    names = store.class_names or ()
    return names[number] if len(names) == n_classes else str(number)


def class_number(store: Store, n_classes: int, text: str) -> int:
    """The number of a class of the classifier, given by name or number. Raises SiteError: no such
    class."""
    names = (
        list(store.class_names or ()) if len(store.class_names or ()) == n_classes else []
    )
    if text in names:
        return names.index(text)
    if text.isdigit() and int(text) < n_classes:
        return int(text)
    expected = f"{abbreviate(names)} or a number" if names else "a number"
    raise SiteError(
        f"the classifier of {store.label} has no class {text!r}; expected {expected} from 0 to "
        f"{n_classes - 1}"
    )


def projections_of(
    store: Store, stream: ResidualStream, origin: Provenance, *, stored: bool = True
) -> dict[str, Projection]:
    """Block -> projection of its heads. stored: whether their outputs have to be in the store.

    Raises:
        MissingInput: the heads' outputs are not stored, or the model cannot be loaded again.
    """
    blocks = [str(site.block) for site in stream.branches if site.part == "attn.branch"]
    if not blocks:
        what = "--heads" if stored else "--patches of a class token"
        raise NotOffered(f"{store.label} has no attention among its branches: no {what}")
    for block in blocks if stored else ():
        name = f"{block}.attn.heads"
        if name not in store.sites:
            raise MissingInput(
                f"{store.label} lacks {name}: extract with --sites blocks --sites head --sites "
                "residual --sites heads"
            )
        if stream.head.pooled_kind is None:
            store.acts(name)
    return _proven(model_of(store, origin.checkpoint, trust=origin.trust), blocks)


PROVEN = 1e-5  # of the branch's largest value; float32 sums over some thousand channels


def _proven(model: LoadedModel, blocks: Sequence[str]) -> dict[str, Projection]:
    """The projections of these blocks of a model on the CPU, each proven on random images.

    Raises:
        NotOffered: no linear layer and factor per channel make the branch of what the heads gave.
    """
    import torch
    from torch import nn

    from vitsee_core.models.capture import Capture, Observer
    from vitsee_core.models.site_tables import site_table
    from vitsee_core.models.survey.tracing import probe_images

    class Keeper(Observer):
        """Site's part -> its tokens, (tokens of all images, dim)."""

        def __init__(self) -> None:
            self.tokens: dict[str, Float] = {}

        def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
            parts = [part for part in (prefix, body.flatten(1, -2)) if part is not None]
            whole = torch.cat(parts, 1).flatten(0, 1)
            self.tokens[site.part] = whole.double().cpu().numpy()

    table = site_table(model)
    n_heads = {block.name: block.n_heads for block in table.attention}
    found = {}
    for block in blocks:
        keeper = Keeper()
        sites = [table[f"{block}.{part}"] for part in ("attn.heads", "attn.branch")]
        with torch.inference_mode(), Capture(model, table, sites=sites) as capture:
            capture.run(probe_images(model.input_size, False), keeper)
        heads, branch = (keeper.tokens[site.part] for site in sites)
        shape = (branch.shape[1], heads.shape[1])
        # The heads' outputs enter the projection, or a norm or an Identity before it.
        around = model.module.get_submodule(table.heads[block].module.rpartition(".")[0])
        layers = [
            layer
            for layer in around.modules()
            if isinstance(layer, nn.Linear) and layer.weight.shape == shape
        ]
        fits = (_fitted(layer, heads, branch, n_heads[block]) for layer in layers)
        own = next((fit for fit in fits if fit is not None), None)
        if own is None:
            raise NotOffered(
                f"{model.name}: the branch of {block}.attn is no linear layer of what the heads "
                "gave, times one factor per channel (a norm is between, say); leave out --heads"
            )
        found[block] = own
    return found


def _fitted(
    layer: nn.Linear, heads: Float, branch: Float, n_heads: int
) -> Projection | None:
    """The layer with the factor per channel (1, or the layer scale) that makes its output the
    branch; None if none does."""
    weight = layer.weight.detach().double().numpy()
    bias = (
        np.zeros(len(weight))
        if layer.bias is None
        else layer.bias.detach().double().numpy()
    )
    plain = heads @ weight.T + bias
    size = np.square(plain).sum(0)
    factor = (plain * branch).sum(0) / np.where(size > 0, size, 1)
    if not np.abs(plain * factor - branch).max() <= PROVEN * np.abs(branch).max():
        return None
    return Projection(weight * factor[:, np.newaxis], bias * factor, n_heads)
