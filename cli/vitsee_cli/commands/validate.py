"""vitsee validate: are these stores whole?"""

from __future__ import annotations

import json

import click

from vitsee_cli import console, options
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
@options.json_option
def command(stores: tuple[Place, ...], deep: bool, as_json: bool) -> None:
    """Check stores for damage.

    Checks their layout, their commits against their arrays, and their checksums. Prints one line
    for each damage found and ends with exit code 1, or says `ok`. An unfinished store is reported
    as such, not as damage. Of several stores all are checked; a line of damage begins with its
    store. Of a store whose damage lies in slabs it says how they are made again.

    \b
      $ vitsee validate b16.zarr
      ok: b16.zarr: 196 of 196 slabs
      $ vitsee validate --deep *.zarr || echo damaged
      $ vitsee validate b16.zarr --json

    \b
    With --json a list of objects
      store      as it was named
      ok         whether no damage was found
      complete   whether all its slabs are committed; null of a damaged one
      damage     a line each
    """
    from vitsee_stores.validation import remedy

    alone = len(stores) == 1 and not as_json
    found = {
        store: _check(store, deep, alone, as_json) for store in dict.fromkeys(stores)
    }
    if as_json:
        records = [
            {"store": str(s), "ok": not d, "complete": _is_complete(s, d), "damage": d}
            for s, d in found.items()
        ]
        console.out(json.dumps(records, indent=2))
    damaged = {store: damage for store, damage in found.items() if damage}
    if not damaged:
        return
    store, damage = next(iter(damaged.items()))
    more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
    first = (
        damage[0]
        if damage[0].startswith(str(store))
        else f"{store} is damaged: {damage[0]}"
    )
    others = (
        f"; {len(damaged)} of {len(found)} stores are damaged" if len(found) > 1 else ""
    )
    help = remedy(damage) if len(found) == 1 else ""
    raise StoreError(f"{first}{more}{others}{help and f' ({help})'}")


def _is_complete(store: Place, damage: list[str]) -> bool | None:
    from vitsee_stores import describe

    return None if damage else bool(describe(store)["complete"])


def _check(store: Place, deep: bool, alone: bool, as_json: bool) -> list[str]:
    """Print the damage of a store, or that it has none, unless it goes into JSON; return it."""
    from vitsee_core.runtime.machine import plural
    from vitsee_stores import describe, validate

    try:
        with console.slab_progress(f"validate {store}") as report:
            damage = validate(store, deep, report)
    except StoreError as error:
        if alone:
            raise
        if not as_json:
            console.out(str(error))
        return [str(error)]
    if as_json:
        return damage
    for line in damage:
        console.out(line if alone else f"{store}: {line}")
    if not damage:
        record = describe(store)
        unfinished = "" if record["complete"] else ", unfinished"
        slabs = f"{record['n_committed']} of {plural(record['n_slabs'], 'slabs')}"
        console.out(f"ok: {store}: {slabs}{unfinished}")
    return damage
