"""vitsee import: a store of vectors or tokens that others computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitsee_cli import console, options
from vitsee_cli.declared import Listed, a_file
from vitsee_cli.extraction_options import store_output_option
from vitsee_cli.sections import STORES
from vitsee_cli.values import StorePath, parse_path, parse_store
from vitsee_core.runtime.machine import plural
from vitsee_stores.errors import VitseeError
from vitsee_stores.url import Place

QUESTION = STORES


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=parse_path)
@store_output_option
@click.option(
    "--as",
    "names",
    metavar="SITE",
    cls=Listed,
    help="What the arrays are called as sites, in order. Repeatable.  [default: keys of "
    ".npz, .pt and .safetensors, else the files' names]",
)
@a_file(
    "--ids",
    help="Whose rows these are: .txt with an id a line, or a table with a column id (and "
    "label).  [default: the columns id and label of FILE; with --like its images]",
)
@click.option(
    "--like",
    metavar="STORE",
    type=parse_store,
    help="A store of the same images, to pair with: its images, labels and order are "
    "taken.  [default: none]",
)
@click.option(
    "--prefix",
    metavar="KIND",
    cls=Listed,
    help="Of (images, tokens, dim): the tokens before the patches, as cls or "
    "cls,reg0,reg1.  [default: none]",
)
@click.option(
    "--grid",
    metavar="ROWSxCOLS",
    help="Of (images, tokens, dim): how the patches lie.  [default: a square]",
)
@click.option(
    "--dtype",
    type=click.Choice(("float32", "float16")),
    default="float32",
    show_default=True,
    help="Of tokens; vectors are stored as float32.",
)
@click.option(
    "--model",
    metavar="NAME",
    default="",
    help="What computed them: stores of one name can be train and test.  [default: the "
    "first file's name]",
)
def command(
    files: tuple[Path, ...],
    output: Place,
    like: StorePath | None,
    prefix: tuple[str, ...],
    grid: str | None,
    **import_options: Any,
) -> None:
    """Make a store of vectors or tokens that others computed.

    Neural responses, features of other tools, another model's activations: each array, (images,
    dim) or (images, tokens, dim), is a site, which analyses read as any other. FILE is .npy, .npz,
    .pt (read with weights_only), .safetensors, .csv, .tsv (a row an image, a column a number) or
    .parquet (also as vitsee export writes it).

    \b
      $ vitsee import it_cortex.csv --like vit.zarr -o it.zarr
      $ vitsee cka vit.zarr it.zarr --tokens mean -o cka.csv
      $ vitsee import layer8.npy layer9.npy --ids images.txt --as l8,l9 -o mine.zarr
      $ vitsee import tokens.npy --like vit.zarr --prefix cls --grid 14x14 -o mine.zarr
    """
    from vitsee_core.features.imports import import_arrays

    like_store = None
    if like is not None:
        (like_store,) = options.open_stores((like,))
    store = import_arrays(
        files,
        output,
        like=like_store,
        prefix=prefix,
        grid=_parse_grid(grid),
        **import_options,
        command=" ".join(console.command_line()),
        progress=console.Reporter("import"),
    )
    sites = plural(len(store.sites), "sites")
    console.out(f"{output}: {plural(store.n_images, 'images')}, {sites}")


def _parse_grid(text: str | None) -> tuple[int, int] | None:
    """Return rows and columns of `ROWSxCOLS`; None without a text."""
    if text is None:
        return None
    rows, _, cols = text.lower().partition("x")
    if not (rows.isdigit() and cols.isdigit() and int(rows) and int(cols)):
        raise VitseeError(f"--grid {text}; expected ROWSxCOLS, as 14x14")
    return int(rows), int(cols)
