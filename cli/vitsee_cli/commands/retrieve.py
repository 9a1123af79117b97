"""vitsee retrieve: whether the images nearest to a query show the same thing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.declared import Listed
from vitsee_cli.sections import KNOWLEDGE
from vitsee_cli.values import WholeNumber, parse_path, parse_store
from vitsee_core.analyses.retrieve.truth import FORMS
from vitsee_core.runtime.options import CLS_OR_MEAN
from vitsee_stores.selectors import VECTOR_WORDS

if TYPE_CHECKING:
    from vitsee_cli.values import StorePath
    from vitsee_core.pages.report.outputs import Outputs
    from vitsee_core.tables.results import Table

QUESTION = KNOWLEDGE
# Unlike `options.stores_argument` it may be empty, for --export-queries and --export-truth alone.
_store_words = click.argument(
    "stores", metavar="[NAME=]STORE...", nargs=-1, type=parse_store
)


def _optional_stores(command: Any) -> Any:
    """Add the argument for stores, which may be left out, with distinct labels."""
    return _store_words(options.distinct_labels(command, "stores"))


@click.command()
@_optional_stores
@click.option(
    "--truth",
    metavar="FILE|labels",
    type=parse_path,
    required=True,
    help="What is right: the .pkl or .json of ROxford and RParis, a .csv with id, images "
    "(and Usage, as GLDv2's), or the word labels: every image is a query, right are "
    "those of its class.",
)
@click.option(
    "--queries",
    metavar="STORE",
    type=parse_store,
    multiple=True,
    help="Queries in a store of their own, one for each model.  [default: rows of STORE]",
)
@click.option(
    "--distractors",
    metavar="STORE",
    type=parse_store,
    multiple=True,
    help="More images to search, none of which is right. Repeatable.  [default: none]",
)
@options.output_options
@options.replicates_option
@options.sites_option("blocks")
@options.tokens_option(VECTOR_WORDS, CLS_OR_MEAN)
@click.option(
    "--ap",
    "form",
    type=click.Choice(FORMS),
    show_default="trapezoid for .pkl and .json, else plain",
    help="Average precision: the area below the broken line, or scikit-learn's.",
)
@click.option(
    "--cutoff",
    "cutoffs",
    metavar="K",
    type=WholeNumber(min=1),
    cls=Listed,
    default=(1, 5, 10),
    show_default="1 5 10",
    help="Mean precision among the K nearest. Repeatable.",
)
@click.option(
    "--metric",
    "metrics",
    metavar="NAME",
    cls=Listed,
    help="Some of the metrics, e.g. map_medium or mp@10. Repeatable.  [default: all]",
)
@click.option(
    "--baseline",
    "baselines",
    type=click.Choice(["random"]),
    cls=Listed,
    help="Also search random vectors of the same shape.  [default: none]",
)
@click.option(
    "--per-query", is_flag=True, help="Add the average precision of each query."
)
@click.option(
    "--export-queries",
    metavar="LIST.csv",
    type=parse_path,
    help="Write the list of the queries, cropped to their boxes, for extract --data.  "
    "[default: do not]",
)
@click.option(
    "--export-truth",
    metavar="FILE.json",
    type=parse_path,
    help="Write the ground truth as JSON.  [default: do not]",
)
@options.images_option
@options.seed_option
@options.device_option
@options.jobs_option
@options.dask_option("sites")
@options.memory_option
@options.allow_partial_option
def command(
    stores: tuple[StorePath, ...],
    truth: Path,
    queries: tuple[StorePath, ...],
    distractors: tuple[StorePath, ...],
    outputs: Outputs,
    export_queries: Path | None,
    export_truth: Path | None,
    **parameters: Any,
) -> None:
    """Search images with images, and score what is near.

    For every query the images of STORE are ranked by the cosine of one vector per image, and the
    mean average precision over queries is reported (Walmer et al. 2023, Figs. 9 right, 29;
    Radenovic et al. 2018). Ranks are counted, not sorted: a million distractors take no more memory
    than a thousand. Queries and images are found by their ids, with or without folder and ending.
    Pickles are read as plain data; nothing in them is run.

    \b
      $ vitsee extract vit_base_patch16_224 --data roxford5k/jpg --tokens pooled -o ox.zarr
      $ vitsee retrieve ox.zarr --truth roxford5k/gnd_roxford5k.pkl -o ox.csv --png ox.png
      $ vitsee retrieve --truth roxford5k/gnd_roxford5k.pkl --export-queries queries.csv
      $ vitsee extract vit_base_patch16_224 --data queries.csv --tokens pooled -o q.zarr
      $ vitsee retrieve ox.zarr --queries q.zarr --truth roxford5k/gnd_roxford5k.pkl
      $ vitsee retrieve b16.zarr --truth labels --sites last

    Columns: store, model, weights, site, block, depth, rel_depth, query (with --per-query), metric
    (map_easy, map_medium, map_hard, mp@K_easy, ...; map and mp@K with labels or a .csv, map@100,
    map@100_public, map@100_private with GLDv2's; ap... of one query), value, std over queries and
    the 95 % interval low, high, n_queries, n_images (searched), baseline (chance: what is expected
    of random order, exactly; random with --baseline random: standard normal vectors, Walmer et al.
    2023, B.3). mp@1 is recall@1. The figure shows precision against depth. Without
    STORE only --export-queries and --export-truth are done.
    """
    from vitsee_cli.analysis import run_analysis
    from vitsee_core.analyses import retrieve
    from vitsee_core.analyses.retrieve.exports import export
    from vitsee_core.pages.report.outputs import check_outputs

    if not stores and export_queries is None and export_truth is None:
        raise click.UsageError(
            "give a STORE to search, or --export-queries, --export-truth"
        )
    if not stores and (outputs.csv is not None or outputs.png is not None):
        raise click.UsageError("-o and --png need a STORE to search")
    check_outputs(outputs, inputs=[truth])
    # These files are about the ground truth alone: they are written without any store, too.
    export(truth, export_queries, export_truth, force=outputs.force)
    if not stores:
        return
    n_stores = len(stores)
    n_queries = len(queries)

    def run(*opened: Any, **more: Any) -> Table:
        """Run the analysis; opened: the stores, then those of queries, then of distractors."""
        return retrieve.run(
            *opened[:n_stores],
            queries=opened[n_stores : n_stores + n_queries],
            distractors=opened[n_stores + n_queries :],
            **more,
        )

    # `run_analysis` opens stores in one sequence; `run` splits it again by the numbers.
    all_stores = (*stores, *queries, *distractors)
    run_analysis(
        run, retrieve.ANALYSIS.draw, all_stores, outputs, truth=truth, **parameters
    )
