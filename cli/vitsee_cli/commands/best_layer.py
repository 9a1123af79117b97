"""vitsee best-layer: which layer is best for which task."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from vitsee_cli import console, options
from vitsee_cli.declared import Listed, a_file
from vitsee_cli.sections import RESULTS
from vitsee_cli.values import NamedFile, parse_named_file
from vitsee_core.analyses import best_layer
from vitsee_core.analyses.best_layer.best_table import ENDINGS, BestTable
from vitsee_core.pages.report.outputs import (
    Outputs,
    check_outputs,
    is_up_to_date,
    touch,
    write_results,
)
from vitsee_core.tables.files import check_new_files
from vitsee_core.tables.formats import ending_of
from vitsee_core.tables.results import ResultFile, read_result
from vitsee_core.tables.sidecars import describe_run
from vitsee_stores.errors import VitseeError

QUESTION = RESULTS


def metrics_of_results(
    ctx: click.Context, _: click.Parameter, incomplete: str
) -> list[str]:
    """Return the metrics in the RESULTS typed before, for the shell to complete."""
    metrics: dict[str, None] = {}  # as an ordered set
    # While an option lacks its value, click has not given the arguments their names yet.
    for word in ctx.args:
        with suppress(VitseeError, OSError, KeyError):
            path = parse_named_file.convert(word, None, ctx).path
            metrics.update(dict.fromkeys(read_result(path).table["metric"]))
    return [metric for metric in metrics if metric.startswith(incomplete)]


@click.command()
@click.argument(
    "results", metavar="[NAME=]RESULTS...", nargs=-1, required=True, type=parse_named_file
)
@options.output_options
@a_file(
    "--table",
    "printed",
    help="Also write the table as it is printed in papers, a row per model and a column "
    "per task, to FILE, a .md, .tex, .png, .svg or .pdf.  [default: do not]",
)
@click.option(
    "--metric",
    "metrics",
    metavar="METRIC",
    cls=Listed,
    shell_complete=metrics_of_results,
    help="Only this metric (top1, purity, iou, ...). Repeatable.  [default: all with a "
    "direction, except those of single classes]",
)
@click.option(
    "--best-token",
    is_flag=True,
    help="Also score each layer by its best single token, where RESULTS have every token "
    "(probe --tokens each).  [default: by the mean over its tokens]",
)
@click.option(
    "--paired",
    type=click.Choice(best_layer.AMONG),
    help="Differences in place of the best layers, with intervals over the images that "
    "both share: layers: each model's best layer less each of its others; models: less "
    "the other models' best. RESULTS are of knn, probe, retrieve, cluster --masks or "
    "saliency with --replicates.  [default: none]",
)
def command(
    results: tuple[NamedFile, ...],
    outputs: Outputs,
    printed: Path | None,
    metrics: tuple[str, ...],
    best_token: bool,
    paired: str | None,
) -> None:
    """Name the best layer of each model for each task.

    RESULTS are tables (.csv, .tsv, .json, ...) that other commands wrote with -o and that have one
    value per layer (probe, knn, cluster, saliency, ...). The best value is the highest or the
    lowest, as the metric's direction demands; metrics without a direction (distances, ratios) are
    left out (Walmer et al. 2023, Tables 1, 5). A task is a file's command (or the NAME that it is
    given here) and metric, with k and shots. Give stores the same names in all commands: they are
    the models of the table.

    \b
      $ vitsee knn train.zarr b16.zarr -o knn.csv
      $ vitsee cluster b16.zarr dino.zarr -o cluster.csv
      $ vitsee best-layer knn.csv cluster.csv --png best.png
      $ vitsee best-layer knn.csv ROx=rox.csv RPar=rpar.csv propagate.csv --table table5.tex
      $ vitsee cka b16.zarr -o cka.csv
      $ vitsee best-layer knn.csv cka.csv --metric top1 --png redundancy.png > best.csv
      $ vitsee knn train.zarr b16.zarr dino.zarr -o knn.csv --replicates --force
      $ vitsee best-layer knn.csv --paired models -o differences.csv --png differences.png

    Columns: store, model, weights, site, block, depth and rel_depth of the best layer (counted from
    0), token, row, col, head of its best row, task, ties (others with the same value), file,
    metric, value, its spread, n_layers compared, n_overlap (how many others have an interval that
    overlaps the best one's), baseline. The figure shows the curves and the table; with a
    self-comparison by cka among RESULTS, also each layer's CKA to the last one beside the scores
    (Kornblith et al. 2019).

    With --paired: store_a, model_a, weights_a, site_a, block_a, depth_a, rel_depth_a, the same with
    _b, token, row, col, head of both, task, metric, value (a less b), std and the 95 % interval
    low, high over images, spread (what std is), n_images, n_blocks. Choosing the best layer on the
    same images is not corrected for. The figure shows each difference and its interval, filled
    where that excludes 0.
    """
    _refuse_conflicts(printed=printed, best_token=best_token, paired=paired)
    inputs: list[Path] = []
    for result in results:
        inputs += Outputs(result.path, with_replicates=True).paths()
    check_outputs(outputs, inputs=inputs)
    if printed is not None:
        ending_of(printed, ENDINGS, "--table")
        check_new_files([*outputs.paths(), printed], force=outputs.force, inputs=inputs)
    if outputs.csv is None:
        console.require_stdout()
    files = best_layer.read(
        [result.path for result in results], [result.label for result in results]
    )
    parameters = {"metrics": metrics, "best_token": best_token, "paired": paired}
    sidecar = _make_sidecar(files, results, parameters)
    has_printed_table = printed is None or printed.is_file()
    may_skip = outputs.if_changed and has_printed_table
    if may_skip and is_up_to_date(outputs, sidecar, inputs):
        touch(outputs)
        console.say(f"{outputs.csv} is up to date")
        return
    if paired is None:
        table = best_layer.run(files, metrics, best_token)
    else:
        table = best_layer.compare(files, metrics, paired)
    further_files = {}
    if printed is not None:
        further_files[printed] = BestTable.from_result(table).written(printed)
    write_results(
        table,
        outputs,
        figure=lambda: best_layer.plot(table, files, metrics),
        sidecar=sidecar,
        stdout=sys.stdout,
        more=further_files,
    )


def _make_sidecar(
    files: Sequence[ResultFile],
    results: Sequence[NamedFile],
    parameters: dict[str, Any],
) -> dict[str, Any]:
    """Return the sidecar of the table, with each of the RESULTS and how that was made.

    Args:
        files: the tables that were read, with their sidecars.
        results: the same as they were typed.
        parameters: everything that decides the table, by option.
    """
    # No stores: the sidecars of the RESULTS name those.
    sidecar = describe_run([], command=console.command_line(), parameters=parameters)
    sidecar["results"] = [
        {
            "path": str(file.path.absolute()),
            "label": result.label,
            "made_by": file.sidecar,
        }
        for file, result in zip(files, results, strict=True)
    ]
    return sidecar


def _refuse_conflicts(
    *, printed: Path | None, best_token: bool, paired: str | None
) -> None:
    """Refuse options that are about the best layers beside --paired, which has none.

    Raises:
        click.UsageError: names the options.
    """
    if paired is None:
        return
    if printed is not None:
        raise click.UsageError(
            "--table prints the best layers; --paired has no such table"
        )
    if best_token:
        raise click.UsageError(
            "--best-token adds a task to the best layers; leave --paired out"
        )
