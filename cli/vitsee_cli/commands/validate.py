"""vitsee validate: are these stores whole?"""

from __future__ import annotations

import click

from vitsee_cli import console
from vitsee_cli.sections import STORES
from vitsee_cli.values import parse_place
from vitsee_stores.errors import StoreError
from vitsee_stores.url import Place

QUESTION = STORES


@click.command()
@click.argument("stores", metavar="STORE...", nargs=-1, required=True, type=parse_place)
@click.option(
    "--deep",
    is_flag=True,
    help="Read every byte: all checksums, and values that should not be NaN or infinite.  "
    "[default: every file's size and last bytes, and the small arrays]",
)
def command(stores: tuple[Place, ...], deep: bool) -> None:
    """Check stores for damage.

    Checks their layout, their commits against their arrays, and their checksums. Prints one line
    for each damage found and ends with exit code 1, or says `ok`. An unfinished store is reported
    as such, not as damage. Of several stores all are checked; a line of damage begins with its
    store. Of a store whose damage lies in slabs it says how they are made again.

    \b
      $ vitsee validate b16.zarr
      ok: b16.zarr: 196 of 196 slabs
      $ vitsee validate --deep *.zarr || echo damaged
    """
    from vitsee_stores.validation import remedy

    found = {store: _check(store, deep, alone=len(stores) == 1) for store in dict.fromkeys(stores)}
    damaged = {store: damage for store, damage in found.items() if damage}
    if not damaged:
        return
    store, damage = next(iter(damaged.items()))
    more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
    first = damage[0] if damage[0].startswith(str(store)) else f"{store} is damaged: {damage[0]}"
    others = f"; {len(damaged)} of {len(found)} stores are damaged" if len(found) > 1 else ""
    help = remedy(damage) if len(found) == 1 else ""
    raise StoreError(f"{first}{more}{others}{help and f' ({help})'}")


def _check(store: Place, deep: bool, alone: bool) -> list[str]:
    """Print the damage of a store, or that there is none; returns the damage."""
    from vitsee_stores import describe, validate

    try:
        with console.slabs_of(f"validate {store}") as report:
            damage = validate(store, deep, report)
    except StoreError as error:
        if alone:
            raise
        console.out(str(error))
        return [str(error)]
    for line in damage:
        console.out(line if alone else f"{store}: {line}")
    if not damage:
        record = describe(store)
        unfinished = "" if record["complete"] else ", unfinished"
        slabs = f"{record['n_committed']} of {record['n_slabs']} slabs"
        console.out(f"ok: {store}: {slabs}{unfinished}")
    return damage
