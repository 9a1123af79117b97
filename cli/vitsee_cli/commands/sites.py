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
    help="Load the weights and verify branches and attention on random pixels, as extract does: "
    "some seconds.  [default: from shapes]",
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
    from vitsee_core.models.interventions.switching import interventions_of
    from vitsee_core.models.without_weights import list_sites
    from vitsee_stores.layout import select_names

    found = list_sites(prove=prove, **vars(model) | interventions)
    for note in found.notes:
        console.warn(note)
    table = found.table
    changed = interventions_of(model.name, table, interventions)
    if sites:
        chosen: Sequence[SiteSpec] = select_names(sites, table.sites)
    else:
        chosen = [s for s in table.sites if not set(s.groups) <= {"modules", "all"}]
    rows = [_row(site) for site in chosen]
    if as_csv:
        writer = csv.DictWriter(
            sys.stdout, list(_row(table.sites[0])), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)
    elif as_json:
        size = list(found.input_size)
        head = {"model": model.name, "input_size": size, "proven": found.proven}
        head |= {"interventions": changed} if changed else {}
        console.out(json.dumps({**head, "sites": rows, **_availability(table)}, indent=2))
    else:
        n_modules = 0 if sites else len(table.sites) - len(chosen)
        # Whether the model calls its blocks otherwise than sites do.
        renamed = any(
            s.block and not (s.site_path or s.block).startswith(s.block) for s in chosen
        )
        _show(rows, table, n_modules, renamed=renamed)
    for line in changed:
        console.say(f"extract runs the model with {line}")
    for remark in found.table.remarks:
        console.warn(remark)
    if not found.proven:
        console.say(
            "read from shapes; extract, or --prove, verifies branches and attention"
        )


def _row(site: SiteSpec) -> dict[str, Any]:
    item_bytes = 4 if site.kind == "vector" or site.dtype == "float32" else 2
    return {
        "site": site.name,
        "groups": " ".join(g for g in site.groups if g != "all"),
        "kind": site.kind,
        "shape": "x".join(map(str, site.shape)),
        "grid": "x".join(map(str, site.layout.grid))
        if site.layout and site.layout.grid
        else "",
        "prefix": " ".join(site.layout.prefix) if site.layout else "",
        "depth": site.depth,
        "rel_depth": round(site.rel_depth, 6),
        "size_bytes": 0 if site.alias_of else math.prod(site.shape) * item_bytes,
        "alias_of": site.alias_of or "",
        "site_path": site.site_path or site.name,
    }


def _availability(table: SiteTable) -> dict[str, Any]:
    """For each option of an extraction beside the sites: what it can store, or the reason why it
    cannot."""
    return {
        "attention": table.attention_refusal or [b.name for b in table.attention],
        "rollout": table.rollout_refusal or True,
        "residual": table.residual_refusal or [s.name for s in table.sublayers],
        "left_out": dict(table.left_out),
    }


def _show(
    rows: list[dict[str, Any]], table: SiteTable, n_modules: int, *, renamed: bool = False
) -> None:
    from rich.table import Table

    from vitsee_stores.manifest import by_reason

    listing = Table(box=None, pad_edge=False, header_style="bold")
    texts = (
        "site",
        *(("site_path",) if renamed else ()),
        "groups",
        "shape",
        "grid",
        "prefix",
    )
    for title in texts:
        listing.add_column(title, overflow="fold")
    listing.add_column("depth", justify="right")
    listing.add_column("per image", justify="right")
    for row in rows:
        cost = (
            f"= {row['alias_of']}"
            if row["alias_of"]
            else console.human_bytes(row["size_bytes"])
        )
        cells = [str(row[c]) for c in (*texts, "depth")]
        listing.add_row(*cells, cost)
    console.stdout().print(listing)
    total = sum(row["size_bytes"] for row in rows)
    console.out(f"\n{len(rows)} sites, {console.human_bytes(total)} per image")
    if n_modules:
        console.out(
            f"not listed: {n_modules} outputs of single modules (--sites modules)"
        )
    attention = [block.name for block in table.attention]
    sublayers = [sublayer.name for sublayer in table.sublayers]
    console.out(f"attention: {_range(attention, 'blocks', table.attention_refusal)}")
    if attention:
        console.out(f"rollout: {table.rollout_refusal or 'available'}")
    console.out(f"residual: {_range(sublayers, 'sublayers', table.residual_refusal)}")
    for line in by_reason(table.left_out):
        console.out(f"left out: {line}")


def _range(names: list[str], nouns: str, refusal: str | None) -> str:
    if not names:
        return refusal or "none"
    ends = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
    return f"{plural(len(names), nouns)} ({ends})"
