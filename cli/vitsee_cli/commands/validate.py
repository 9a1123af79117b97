"""vitsee validate: are these stores whole?"""

from __future__ import annotations

import json
from typing import Any

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

    is_alone = len(stores) == 1 and not as_json
    damage_of = {
        store: _check_store(store, deep, is_alone, as_json)
        for store in dict.fromkeys(stores)  # a store that is named twice is checked once
    }
    if as_json:
        records = [_json_record(store, damage) for store, damage in damage_of.items()]
        console.out(json.dumps(records, indent=2))
    damaged = {store: damage for store, damage in damage_of.items() if damage}
    if not damaged:
        return
    # The line on stderr is about the first damage.
    store, damage = next(iter(damaged.items()))
    line = damage[0]
    if not line.startswith(str(store)):
        line = f"{store} is damaged: {line}"
    if len(damage) > 1:
        line += f", and {len(damage) - 1} more"
    if len(damage_of) > 1:
        line += f"; {len(damaged)} of {len(damage_of)} stores are damaged"
    else:
        advice = remedy(damage)
        if advice:
            line += f" ({advice})"
    raise StoreError(line)


def _json_record(store: Place, damage: list[str]) -> dict[str, Any]:
    """Return the object of --json about a store."""
    from vitsee_stores import describe

    is_complete = None  # a damaged store cannot say it
    if not damage:
        is_complete = bool(describe(store)["complete"])
    return {
        "store": str(store),
        "ok": not damage,
        "complete": is_complete,
        "damage": damage,
    }


def _check_store(store: Place, deep: bool, is_alone: bool, as_json: bool) -> list[str]:
    """Check a store, print its damage or that it has none, and return the damage, a line each.

    Args:
        store: folder or URL.
        deep: read every byte.
        is_alone: the only store, whose name need not stand before each line.
        as_json: print nothing.

    Raises:
        StoreError: the only store cannot be opened.
    """
    from vitsee_core.runtime.machine import plural
    from vitsee_stores import describe, validate

    try:
        with console.slab_progress(f"validate {store}") as report:
            damage = validate(store, deep, report)
    except StoreError as error:
        if is_alone:
            raise
        if not as_json:
            console.out(str(error))
        return [str(error)]
    if as_json:
        return damage
    for line in damage:
        console.out(line if is_alone else f"{store}: {line}")
    if not damage:
        record = describe(store)
        slabs = f"{record['n_committed']} of {plural(record['n_slabs'], 'slabs')}"
        if not record["complete"]:
            slabs += ", unfinished"
        console.out(f"ok: {store}: {slabs}")
    return damage
