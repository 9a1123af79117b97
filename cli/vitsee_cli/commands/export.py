"""vitsee export: features of one site as a plain file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitsee_cli import console, options
from vitsee_cli.declared import a_file
from vitsee_cli.sections import STORES
from vitsee_cli.values import StorePath, parse_path, parse_store
from vitsee_core.features.exporting import (
    DTYPES,
    ENDINGS,
    export,
    samples_table,
)
from vitsee_core.features.exporting_saev import export_saev
from vitsee_core.runtime.execution import Execution
from vitsee_core.tables.files import TABLE_ENDINGS, check_new_files
from vitsee_core.tables.formats import ending_of
from vitsee_stores.errors import VitseeError

QUESTION = STORES


@click.command()
@click.argument("store", metavar="[NAME=]STORE", type=parse_store)
@click.argument("site", metavar="SITE")
@a_file(
    "-o",
    "--output",
    required=True,
    help="Where to: .npy, .safetensors, or .parquet (one vector per image, with its id "
    "and label); with --format saev a folder.",
)
@click.option(
    "--format",
    "format_kind",
    type=click.Choice(("file", "saev")),
    default="file",
    show_default=True,
    help="saev: activation shards (protocol 2.1) of one or several sites, to train "
    "sparse autoencoders on.",
)
@click.option(
    "--samples",
    metavar="TABLE",
    type=parse_path,
    help="Also write row, index, id, label and split of the exported images, in their "
    "order.  [default: no table]",
)
@options.tokens_option(
    options.FEATURE_TOKENS, "cls where there is one, else mean; saev: cls and patches"
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="stored",
    show_default=True,
    help="stored: float16 for tokens, float32 for pooled vectors, as in the store; saev: "
    "float32.",
)
@options.force_option
@options.images_option
@options.seed_option
@options.jobs_option
@options.memory_option
@options.allow_partial_option
def command(
    store: StorePath,
    site: str,
    output: Path,
    format_kind: str,
    samples: Path | None,
    tokens: str | None,
    dtype: str,
    force: bool,
    allow_partial: bool,
    **execution_fields: Any,
) -> None:
    """Write the features of a site to a plain file.

    For tools that read no stores: one array (images, dim), or (images, tokens, dim) where several
    tokens are chosen, in the store's order, written slab by slab in bounded memory. What it is of
    goes into FILE.json. Images that could not be read are left out. With --format saev: a folder
    saev/shards/HASH below -o, which saev's loaders take.

    \b
      $ vitsee export b16.zarr pooled -o pooled.npy --samples pooled.csv
      $ vitsee export b16.zarr blocks.8.out --tokens patches -o block8.safetensors
      $ vitsee export b16.zarr blocks.-1.out --tokens cls -o cls.parquet
      $ vitsee export b16.zarr blocks.8.out,blocks.11.out --format saev -o shards/
    """
    # All refusals before the store is opened.
    if format_kind == "file":
        ending_of(output, ENDINGS, "the export")
    elif dtype == "float16":
        raise VitseeError("--dtype float16 with --format saev; its shards are float32")
    if samples is not None:
        ending_of(samples, TABLE_ENDINGS, "the table")
        # Both files are checked before either is written.
        new_files = [samples]
        if format_kind == "file":
            new_files.append(output)
        check_new_files(new_files, force=force)
    (opened,) = options.open_stores((store,), allow_partial=allow_partial)
    execution = Execution(progress=console.Reporter("export"), **execution_fields)
    if format_kind == "saev":
        shard_folder = export_saev(
            opened, [site], output, tokens=tokens, force=force, execution=execution
        )
        line = str(shard_folder)
    else:
        shape = export(
            opened,
            site,
            output,
            tokens=tokens,
            dtype=dtype,
            force=force,
            execution=execution,
        )
        line = f"{output}: {' x '.join(map(str, shape))}"
    if samples is not None:
        samples_table(opened, execution).write(samples, force=force)
    console.out(line)
