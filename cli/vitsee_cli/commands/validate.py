"""vitsee validate: is this store whole?"""

from __future__ import annotations

from pathlib import Path

import click

from vitsee_cli import console, options
from vitsee_stores.errors import StoreError


@click.command()
@options.store_argument
@click.option(
    "--deep",
    is_flag=True,
    help="Read every byte: all checksums, and values that should not be NaN or infinite.  "
    "[default: the small arrays only]",
)
def command(store: Path, deep: bool) -> None:
    """Check a store for damage.

    Its layout, its commits against its arrays, its checksums. Prints one line for each damage
    found and ends with exit code 1, or says `ok`. A store that is not finished yet is no damage,
    and said.

    \b
      $ vitsee validate b16.zarr
      ok: b16.zarr: 196 of 196 slabs
      $ vitsee validate --deep b16.zarr || echo damaged
    """
    from vitsee_stores import describe, validate

    damage = validate(store, deep=deep)
    for line in damage:
        console.out(line)
    if damage:
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise StoreError(f"{store} is damaged: {damage[0]}{more}")
    record = describe(store)
    unfinished = "" if record["complete"] else ", unfinished"
    slabs = f"{record['n_committed']} of {record['n_slabs']} slabs"
    console.out(f"ok: {store}: {slabs}{unfinished}")
