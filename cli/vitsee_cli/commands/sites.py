"""vitsee sites: what can be captured of a model, and its size on disk."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options
from vitsee_cli.extraction_options import intervention_options
from vitsee_cli.model_options import model_options
from vitsee_cli.sections import STORES
from vitsee_core.runtime.machine import plural

if TYPE_CHECKING:
    from vitsee_core.extraction.options import ModelOptions
    from vitsee_core.models.sites import SiteTable
    from vitsee_stores.layout import SiteSpec

QUESTION = STORES


@click.command()
@model_options
@options.sites_option(show_default="all but single modules")
@intervention_options
@click.option(
    "--json", "as_json", is_flag=True, help="Everything as JSON.  [default: a table]"
)
@click.option(
    "--csv", "as_csv", is_flag=True, help="The sites as CSV.  [default: a table]"
)
@click.option(
    "--prove",
    is_flag=True,
    help="Load the weights and verify branches and attention on random pixels, as "
    "extract does: some seconds.  [default: from shapes]",
)
def command(
    model: ModelOptions,
    sites: tuple[str, ...],
    as_json: bool,
    as_csv: bool,
    prove: bool,
    **interventions: tuple[str, ...],
) -> None:
    """List a model's sites, shapes and bytes.

    No data is needed and no weights are loaded: the model is run once on shapes alone. In a few
    families (CoAtNet) these show branches whose sums pixels disprove; --prove says which. Where
    shapes do not show the order of tokens (Hiera, MViTv2), random weights are drawn, and all is
    proven.

    \b
      $ vitsee sites demo:vit
      $ vitsee sites vit_base_patch16_224 --sites blocks --sites head
      $ vitsee sites resnet50 --sites 'layer4.*' --csv > sites.csv

    The names are what --sites of the other commands takes. Bytes are those of float16 (vectors:
    float32) before any compression; a site that equals another one is stored once. What is to be
    changed while the model runs is checked against them.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other")
    # These import torch, which takes seconds: wrong options are refused before.
    from vitsee_core.models.interventions.switching import interventions_of
    from vitsee_core.models.without_weights import list_sites
    from vitsee_stores.layout import select_names

    listing = list_sites(prove=prove, **{**vars(model), **interventions})
    for note in listing.notes:
        console.warn(note)
    table = listing.table
    intervention_lines = interventions_of(model.name, table, interventions)
    if sites:
        chosen: Sequence[SiteSpec] = select_names(sites, table.sites)
    else:
        # Not the hundreds of single modules that are nothing else.
        chosen = [s for s in table.sites if not set(s.groups) <= {"modules", "all"}]
    rows = [_site_record(site) for site in chosen]
    if as_csv:
        # `rows` may be empty: the header is that of any site.
        writer = csv.DictWriter(
            sys.stdout, list(_site_record(table.sites[0])), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)
    elif as_json:
        record: dict[str, Any] = {
            "model": model.name,
            "input_size": list(listing.input_size),
            "proven": listing.proven,
        }
        if intervention_lines:
            record["interventions"] = intervention_lines
        record["sites"] = rows
        record.update(_availability(table))
        console.out(json.dumps(record, indent=2))
    else:
        n_modules = 0 if sites else len(table.sites) - len(chosen)
        # Whether the model's own names of its blocks differ from the names in sites.
        shows_paths = any(
            site.block and not (site.site_path or site.block).startswith(site.block)
            for site in chosen
        )
        _print_listing(rows, table, n_modules, shows_paths=shows_paths)
    for line in intervention_lines:
        console.say(f"extract runs the model with {line}")
    for remark in table.remarks:
        console.warn(remark)
    if not listing.proven:
        console.say(
            "read from shapes; extract, or --prove, verifies branches and attention"
        )


def _site_record(site: SiteSpec) -> dict[str, Any]:
    """Return the columns of a site as --csv and --json have them; size_bytes is of one image."""
    grid = ""
    prefix = ""
    if site.layout:
        grid = "x".join(map(str, site.layout.grid or ()))
        prefix = " ".join(site.layout.prefix)
    # Vectors are kept as float32 by default, tokens as float16.
    item_bytes = 4 if site.kind == "vector" or site.dtype == "float32" else 2
    size_bytes = math.prod(site.shape) * item_bytes
    if site.alias_of:  # not stored: it equals another site
        size_bytes = 0
    return {
        "site": site.name,
        "groups": " ".join(group for group in site.groups if group != "all"),
        "kind": site.kind,
        "shape": "x".join(map(str, site.shape)),
        "grid": grid,
        "prefix": prefix,
        "depth": site.depth,
        "rel_depth": round(site.rel_depth, 6),
        "size_bytes": size_bytes,
        "alias_of": site.alias_of or "",
        "site_path": site.site_path or site.name,
    }


def _availability(table: SiteTable) -> dict[str, Any]:
    """Return, for each option of an extraction beside the sites, what it can store.

    A text is the reason why it can store nothing.
    """
    attention = [block.name for block in table.attention]
    sublayers = [sublayer.name for sublayer in table.sublayers]
    return {
        "attention": table.attention_refusal or attention,
        "rollout": table.rollout_refusal or True,
        "residual": table.residual_refusal or sublayers,
        "left_out": dict(table.left_out),
    }


def _print_listing(
    rows: list[dict[str, Any]],
    table: SiteTable,
    n_modules: int,
    *,
    shows_paths: bool = False,
) -> None:
    """Print the sites as a table, and below it what else can be stored.

    Args:
        rows: records of the sites.
        table: all sites of the model.
        n_modules: how many single modules are not in `rows`.
        shows_paths: whether there is a column with the model's own names.
    """
    from rich.table import Table

    from vitsee_stores.manifest import by_reason

    listing = Table(box=None, pad_edge=False, header_style="bold")
    text_columns = ["site", "groups", "shape", "grid", "prefix"]
    if shows_paths:
        text_columns.insert(1, "site_path")
    for title in text_columns:
        listing.add_column(title, overflow="fold")
    listing.add_column("depth", justify="right")
    listing.add_column("per image", justify="right")
    for row in rows:
        if row["alias_of"]:
            size = f"= {row['alias_of']}"
        else:
            size = console.human_bytes(row["size_bytes"])
        cells = [str(row[column]) for column in text_columns]
        listing.add_row(*cells, str(row["depth"]), size)
    console.stdout().print(listing)
    total = sum(row["size_bytes"] for row in rows)
    console.out(f"\n{len(rows)} sites, {console.human_bytes(total)} per image")
    if n_modules:
        console.out(
            f"not listed: {n_modules} outputs of single modules (--sites modules)"
        )
    attention = [block.name for block in table.attention]
    sublayers = [sublayer.name for sublayer in table.sublayers]
    console.out(f"attention: {_range_text(attention, 'blocks', table.attention_refusal)}")
    if attention:
        console.out(f"rollout: {table.rollout_refusal or 'available'}")
    console.out(
        f"residual: {_range_text(sublayers, 'sublayers', table.residual_refusal)}"
    )
    for line in by_reason(table.left_out):
        console.out(f"left out: {line}")


def _range_text(names: list[str], nouns: str, refusal: str | None) -> str:
    """Return `12 blocks (blocks.0 to blocks.11)`; without names the refusal, or `none`."""
    if not names:
        return refusal or "none"
    ends = names[0]
    if len(names) > 1:
        ends += f" to {names[-1]}"
    return f"{plural(len(names), nouns)} ({ends})"
