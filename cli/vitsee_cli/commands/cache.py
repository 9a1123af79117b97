"""vitsee cache: Gram matrices and indexes of tar files that are kept between commands."""

from __future__ import annotations

import sys
from typing import Any

import click

from vitsee_cli import console
from vitsee_cli.sections import STORES
from vitsee_cli.values import parse_place
from vitsee_stores.url import Place

QUESTION = STORES

_locations = click.argument(
    "locations", metavar="[STORE|FOLDER]...", nargs=-1, type=parse_place
)


@click.group()
def command() -> None:
    """List or remove cached Gram matrices and tar indexes.

    cka, cka-heads, similarity and localize keep Gram matrices in STORE.grams beside each store, or
    in the folder of --cache; of a store at a URL in the user's cache folder. There extract keeps
    the index of many tar files. What is removed is made again when a command needs it.

    \b
      $ vitsee cache ls
      $ vitsee cache ls b16.zarr results
      $ vitsee cache rm b16.zarr
    """


@command.command("ls")
@_locations
def ls(locations: tuple[Place, ...]) -> None:
    """List the caches of STOREs or below FOLDERs, as CSV.

    Without an argument: below the working folder, and in the user's cache folder.

    Columns: folder, store_id (of the first matrix), n_matrices, size_bytes. An index of tar files
    is a row of its own, without matrices.
    """
    from vitsee_core.similarity.cache import caches_of
    from vitsee_core.tables.results import Table

    columns = ("folder", "store_id", "n_matrices", "size_bytes")
    rows: list[dict[str, Any]] = [vars(cache) for cache in caches_of(locations)]
    Table.from_rows(rows, columns).to_csv(sys.stdout)


@command.command("rm")
@click.argument(
    "locations", metavar="STORE|FOLDER...", nargs=-1, type=parse_place, required=True
)
def rm(locations: tuple[Place, ...]) -> None:
    """Remove the caches of STOREs or below FOLDERs.

    Only files of Gram matrices and indexes of tar files are removed, and folders that are empty
    then. Commands that use them at the same time make them again.
    """
    from vitsee_core.runtime.machine import human_bytes, plural
    from vitsee_core.similarity.cache import caches_of

    caches = caches_of(locations)
    for cache in caches:
        cache.remove()
    n_matrices = sum(cache.n_matrices for cache in caches)
    size_bytes = sum(cache.size_bytes for cache in caches)
    # An index of tar files is a cache without matrices.
    n_indexes = sum(cache.n_matrices == 0 for cache in caches)
    folders = plural(len(caches) - n_indexes, "folders")
    removed = f"{plural(n_matrices, 'Gram matrices')} in {folders}"
    if n_indexes:
        removed += f", {plural(n_indexes, 'index files')} of tar files"
    console.say(f"removed {removed}, {human_bytes(size_bytes)}")
