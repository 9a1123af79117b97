"""Logit attribution: which sublayers, and which heads, write the model's answer?

The stream that the classifier reads is the embedding plus every residual branch. With the scale of
the final norm as it is for the image, all that follows is linear, so that each of these terms has
its own part of every logit (direct logit attribution: Elhage et al. 2021, "A mathematical framework
for transformer circuits"; of CLIP's image encoder Gandelsman et al. 2024)

    logit_c = sum over terms b of  W_c . (g * pool(b - mean(b)) / s)  +  (W_c . beta + bias_c)

with W and bias of the classifier, g and beta of the final norm, and s the standard deviation that
the norm divides the image's stream by. If the norm precedes the pooling, every token has its own s.
An RMS norm and a batch norm do not centre, and a batch norm's s is its running one. The last
bracket is a part of its own, `bias`.

The parts add up to the logits that the store has, but for the rounding of stored activations. The
difference is the part `residue`. Its largest value over images and classes, divided by the image's
largest logit less the classifier's bias, stands in the sidecar. It is below 1e-5 if the classifier
reads the class token or the mean over patches, which stores keep in float32, and for stores made
with --dtype float32.

Softmax does not see a constant that is added to all logits of an image. So the mean over classes is
subtracted from every part, unless `raw`. A direct part is not the effect of a sublayer: what it
writes also changes what later sublayers do, and an ablation changes these, too.

With `by_head`, the part of attention is divided further: into what each head gave, through its
columns of the output projection, and the projection's bias.

With `patches`, single images are mapped. If the classifier reads the mean over tokens, a patch has
the part of its own token, for every term. If it reads the class token, a patch has what each
block's attention moves from it to the class token (weight times value, through the projection), as
in Gandelsman et al. All that the map leaves out (other tokens, MLPs, biases) is the part `rest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from vitsee_core.analyses.logit_attribution import patches
from vitsee_core.analyses.logit_attribution.contributions import (
    BIAS,
    HEAD,
    LOGIT,
    PROJECTION_BIAS,
    RESIDUE,
)
from vitsee_core.analyses.logit_attribution.explained_store import (
    LABEL,
    METRIC,
    PREDICTED,
    ExplainedStore,
)
from vitsee_core.analyses.logit_attribution.figures import (
    SCALES,
    draw_attributions,
    draw_patch_parts,
)
from vitsee_core.analyses.logit_attribution.patches import patch_table
from vitsee_core.analyses.logit_attribution.residual_stream import (
    ResidualStream,
    residual_stream,
)
from vitsee_core.declaration import Analysis
from vitsee_core.models.provenance import Classifiers, Provenance
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import FLOW, Gather, Offers, Option, image_option
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.store_selection import select_each
from vitsee_core.statistics.moments import INTERVAL_METHOD
from vitsee_core.tables.columns import SITE
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured
from vitsee_core.tables.results import Table
from vitsee_core.types import pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLUMNS = (
    *SITE,
    "head",
    "class",
    "part",
    "metric",
    "value",
    "std",
    "low",
    "high",
    "n_images",
)


@analysis
def run(
    *stores: Store,
    by_head: Annotated[
        bool,
        Option("Also each attention head, of extract --sites heads (loads the model)."),
    ] = False,
    target: Annotated[
        str | None,
        Option(
            "Whose logit, of every image: its label's, or that of the class that the "
            "model predicts.",
            choices=(LABEL, PREDICTED),
            default="label; predicted without labels",
        ),
    ] = None,
    by_class: Annotated[bool, Option("Means over the images of each class.")] = False,
    classes: Annotated[
        Sequence[str],
        Option(
            "The logit of this class, by name or number, for every image in place of "
            "its own. Repeatable.",
            "--class",
            metavar="CLASS",
            default="each image's own",
        ),
    ] = (),
    raw: Annotated[
        bool, Option("Logits as they are, not less their mean over classes.")
    ] = False,
    patches: Annotated[
        bool,
        Option(
            "Maps of single images in place of means: what each patch adds, by its own "
            "token where their mean is read, else by attention from the class token "
            "(loads the model)."
        ),
    ] = False,
    image: Annotated[
        Sequence[str],
        image_option("Of --patches: map", "the first 4"),
    ] = (),
    origin: Annotated[Provenance | None, Gather(Provenance)] = None,
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="slabs", replicates=False)
    ] = DEFAULT,
) -> Table:
    """Return the part of the logits that each term of the stream adds.

    There is a row per store, term and class, with `by_head` also per head. The columns are
    `COLUMNS`.
    `value` is in units of logits, mean over images. `part` says what the row is about: `input`
    (where the stream begins), the kind of sublayer, `head`, `projection_bias`, `bias` (of norm and
    classifier), `residue` (the logit less all parts but heads), and `logit` as stored. Images
    without a label are left out if the logit of their label is explained. With `patches` the
    columns are `patches.COLUMNS`, with a row per image, class, term and patch.

    Memory: one site of a slab at a time; with `patches` that of one image, and one block's
    attention.

    Args:
        stores: stores with a classifier and all branches of the blocks that it reads.
        by_head: also explain each attention head; the store needs the heads' outputs.
        target: "label" or "predicted", the class of each image; by default the label.
        by_class: means over the images of each class in place of all.
        classes: names or numbers of classes that are explained for every image.
        raw: logits as they are, not less their mean over classes.
        patches: maps of single images in place of means.
        image: the images that are mapped; by default the first four.
        origin: where weights and images are now. Weights are read for stores without a classifier,
            for `by_head`, and for `patches` of a class token; images for the latter and for
            photographs.
        execution: images, seed and parallel explained.

    Raises:
        MissingInput: no store has the branches and a classifier, or its logits are not such a sum.
        SiteError: the classifier does not have a class that was named.
        VitseeError: options that exclude each other, or labels that are not the model's classes.

    Examples:
        >>> import vitsee
        >>> table = vitsee.logit_attribution("branches.zarr", images=50)
        >>> table["site"].tolist()[:5]  # a row for each part of the logit
        ['embed', 'blocks.0.attn', 'blocks.0.mlp', 'blocks.1.attn', 'blocks.1.mlp']
    """
    if classes and (by_class or target):
        option = "--by-class" if by_class else "--target"
        raise VitseeError(
            f"--class takes one class's logit of every image, {option} each image's "
            "own: give one of them"
        )
    if patches and (by_head or by_class):
        raise VitseeError(
            "--patches maps single images: leave --by-head and --by-class out"
        )
    if image and not patches:
        raise VitseeError("--image names images to map: give --patches, too")
    # Where the data and weights are now; as the store says by default.
    origin = origin or Provenance()
    classifiers = Classifiers(origin)

    def find_stream(store: Store, _: Sequence[str]) -> list[ResidualStream]:
        """Return the store's stream, as the only member: `select_each` wants a list per store."""
        return [residual_stream(store, classifiers(store), execution.rows(store))]

    selected = select_each(stores, ["blocks"], find_stream)
    explained_stores = [
        ExplainedStore.from_options(
            store,
            stream,
            execution.rows(store),
            heads=by_head,
            target=target,
            by_class=by_class,
            classes=classes,
            origin=origin,
        )
        for store, (stream,) in selected.members
    ]
    if patches:
        # Single images, without means over images and their intervals.
        table = patch_table(explained_stores, image, raw, origin, execution)
        return replace(table, notes={**table.notes, **selected.notes()})
    # The residue of each store stands in the notes: it bounds what the parts may miss.
    rows: list[dict[str, Any]] = []
    residue_notes = {}
    with counting(
        execution.progress, sum(explained.rows.n for explained in explained_stores)
    ):
        for explained in explained_stores:
            store_rows, note = explained.table(raw, execution)
            rows += store_rows
            residue_notes[explained.store.label] = note
    notes = {
        "interval": INTERVAL_METHOD,
        "target": {
            explained.store.label: explained.target for explained in explained_stores
        },
        "logits": "as they are" if raw else "less the mean over classes",
        "head": {
            explained.store.label: explained.stream.head.record()
            for explained in explained_stores
        },
        "residue": {
            "what": (
                "largest difference of logits and sums of parts over images and classes, "
                "over the image's largest logit less the classifier's bias"
            ),
            **residue_notes,
        },
        "seed": execution.seed,
        "images": {
            explained.store.label: explained.rows.describe()
            for explained in explained_stores
        },
        **selected.notes(),
    }
    return Table.from_rows(rows, COLUMNS, notes)


def plot(
    table: Table,
    scale: Annotated[
        str,
        Option(
            "Colours of --patches: one scale for all maps, or each map over its own "
            "range.",
            choices=SCALES,
        ),
    ] = SCALES[0],
) -> Figure:
    """Draw the table: bars per sublayer, or for a table of `patches` maps beside photographs."""
    if "image" in table.frame.columns:
        return draw_patch_parts(table, scale)
    return draw_attributions(table)


def headline(table: Table) -> list[Answer]:
    """Return per store the sublayer that writes most, and what the last third of them writes."""
    answers = []
    for store, rows in by_store(table, metric=METRIC, head=None, **{"class": None}):
        not_sublayers = ["input", HEAD, PROJECTION_BIAS, BIAS, RESIDUE, LOGIT]
        # The remaining parts are sublayers, in the model's order.
        logit = rows.filter(part=LOGIT)["value"]
        sublayers = rows.filter(~pl.col("part").is_in(not_sublayers))
        if len(sublayers) == 0 or len(logit) == 0:
            continue
        _, largest = extremes(sublayers)
        late = sublayers.filter(pl.col("rel_depth") >= 2 / 3)["value"].sum()
        text = (
            f"of a logit of {logit[0]:.3g}, {sublayers['site'][largest]} writes most: "
            f"{measured(sublayers, largest)}; the last third of the sublayers {late:.3g}"
        )
        answers.append((store, text))
    return answers


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Split logits into what each layer and head writes.

    The residual branches, one by one, through the final norm (its scale as it is for
    the image) and the classifier: direct logit attribution (Elhage et al. 2021;
    Gandelsman et al. 2024). The parts add up to the logit of each image's label, less
    the mean over classes; what rounding leaves is a row of its own. Stores need every
    branch, and for --by-head what each head gave:

      $ vitsee extract vit_base_patch16_224 --data photos --sites blocks --sites head \\
          --sites residual --sites heads --tokens pooled -o b16.zarr

      $ vitsee logit-attribution b16.zarr -o parts.csv --png parts.png
      $ vitsee logit-attribution b16.zarr --by-head --by-class -o heads.csv
      $ vitsee logit-attribution b16.zarr --patches --image cat.jpg --png cat.png > cat.csv

    --tokens pooled is enough where the classifier reads the class token, or normalises
    the mean over patches. Not for models whose logits are no such sum: with an
    activation or a norm after the sum (ResNet v1), an attention or maximum that pools,
    several classifiers, or layers behind the blocks.
    """,
    needs=("residual", "images"),
    reading=(
        "What each sublayer adds to the logit of the image's class, directly, with the "
        "final norm's scale held fixed: bars above 0 speak for the class, below 0 "
        "against it. The line is their running sum, which ends at the model's own logit. "
        "It says where the answer is written, not what it was made from: early layers "
        "act through later ones."
    ),
    source="Elhage et al. 2021; Gandelsman et al. 2024",
    columns=COLUMNS,
    other_columns=(patches.COLUMNS,),
    meanings={
        "site": "the sublayer; the stream's beginning; logits: the whole model",
        "class": "empty: each image's own",
        "part": (
            "input, attn, mlp, token, channel, block; head, projection_bias; bias, "
            "residue, logit; of --patches also patches, all of a map, and rest"
        ),
    },
    metrics=(METRIC,),
    run=run,
    plot=plot,
    headline=headline,
)
