"""Damage done to small stores on purpose: is all of it found, and does a reader ever give other
numbers without a word?

    python -m tests.faults.damage 300 [--seed 0] [--grown]

Three kinds, so many of each: whole chunks, rows and markers put in another's place (swapped between
slabs, copied, taken from a store of the same shapes), single bits flipped in chunks, and single
bits flipped in metadata that change a parsed value. After each, `validate` and `validate --deep`
are asked, and every array, the samples and the manifest are read and compared with those before.
Exit code 1 where `validate --deep` missed one or a reader gave something else.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults import fuzz
from vitsee_stores import StoreWriter, open_store, validate
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import arrays

KINDS = ("misplaced", "bit in a chunk", "bit in metadata")
Undo = list[tuple[Path, bytes]]


class Trials:
    """Two stores of the same shapes and other numbers in `folder`; the first is damaged. grown:
    whether both have three generations."""

    def __init__(self, folder: Path, seed: int, grown: bool = False):
        self.random = random.Random(seed)
        self.store, self.other = folder / "a.zarr", folder / "b.zarr"
        for path, numbers in ((self.store, 1), (self.other, 2)):
            fill(path, np.random.default_rng(numbers))
            if grown:
                fuzz.grow(path)
        self.before = read(self.store)
        files = [path for path in self.store.rglob("*") if path.is_file()]
        self.documents = sorted(path for path in files if path.name == "zarr.json")
        self.chunks = sorted(path for path in files if path.name != "zarr.json")

    def run(self, kind: str, n: int) -> Counter[str]:
        """How `n` trials of one kind ended."""
        damage = {"misplaced": self.misplaced, "bit in a chunk": self.chunk_bit}
        ended: Counter[str] = Counter()
        while ended["trials"] < n:
            undo = damage.get(kind, self.metadata_bit)()
            if any(path.read_bytes() != data for path, data in undo):
                ended["trials"] += 1
                ended["validate finds"] += self.found(deep=False)
                deep, outcome = self.found(deep=True), self.reads()
                ended["validate --deep finds"] += deep
                ended[f"readers: {outcome}"] += 1
                if not deep or outcome == "other numbers":
                    names = ", ".join(
                        str(path.relative_to(self.store)) for path, _ in undo
                    )
                    print(f"{kind}: {names}: {outcome}, found: {deep}", file=sys.stderr)
            for path, data in undo:
                path.write_bytes(data)
        return ended

    def found(self, deep: bool) -> bool:
        """Whether `validate` says that something is wrong."""
        try:
            return bool(validate(self.store, deep=deep))
        except VitseeError:
            return True

    def reads(self) -> str:
        """What readers make of it."""
        try:
            now = read(self.store)
        except VitseeError:
            return "refused"
        if any(
            now[name] != value
            for name, value in self.before.items()
            if now[name] is not None
        ):
            return "other numbers"
        return "refused" if any(value is None for value in now.values()) else "unaffected"

    def misplaced(self) -> Undo:
        """One chunk, row or marker where it does not belong."""
        target, rng = self.rng_chunk(), self.random
        size = target.stat().st_size
        alike = [
            path for path in self.chunks if path.stat().st_size == size and path != target
        ]
        action = rng.choice(("swap", "copy", "foreign", "foreign slab"))
        if (
            action == "foreign slab"
        ):  # all of a slab but, half the time, its marker or its row
            ending = f"c.{rng.randrange(2)}"
            left = rng.choice(("commits", "checksums", "", ""))
            paths = [
                path
                for path in self.chunks
                if path.name.startswith(ending) and path.parent.name != left
                and not {"samples", "weights", "generations"} & {*path.parts}
            ]  # fmt: skip
            undo = [(path, path.read_bytes()) for path in paths]
            for path in paths:
                path.write_bytes((self.other / path.relative_to(self.store)).read_bytes())
            return undo
        if action == "foreign" or not alike:
            undo = [(target, target.read_bytes())]
            target.write_bytes((self.other / target.relative_to(self.store)).read_bytes())
            return undo
        source = rng.choice(alike)
        undo = [(target, target.read_bytes()), (source, source.read_bytes())]
        target.write_bytes(undo[1][1])
        if action == "swap":
            source.write_bytes(undo[0][1])
        return undo

    def chunk_bit(self) -> Undo:
        """One bit of a chunk's file."""
        target = self.rng_chunk()
        return self.flip(target, self.random.randrange(8 * target.stat().st_size))

    def metadata_bit(self) -> Undo:
        """One bit of a zarr.json (half the time the root's) after which another value is read; of
        `complete` alone nobody can know what it was."""
        target = self.random.choice(
            (self.documents[-1], self.random.choice(self.documents))
        )
        target = self.random.choice((self.store / "zarr.json", target))
        before = target.read_bytes()
        while True:
            undo = self.flip(target, self.random.randrange(8 * len(before)))
            try:
                if json.loads(target.read_bytes()) != json.loads(before):
                    return undo
            except ValueError:
                pass
            target.write_bytes(before)

    def flip(self, target: Path, bit: int) -> Undo:
        """The file with one bit changed."""
        before = target.read_bytes()
        data = bytearray(before)
        data[bit // 8] ^= 1 << bit % 8
        target.write_bytes(data)
        return [(target, before)]

    def rng_chunk(self) -> Path:
        """Any chunk, row or marker; those of each array as likely."""
        folder = self.random.choice(sorted({path.parent for path in self.chunks}))
        return self.random.choice([path for path in self.chunks if path.parent == folder])


def fill(path: Path, rng: np.random.Generator) -> None:
    """The fuzz test's small store with random numbers."""
    fuzz.make_store(path, commit=False)
    writer = StoreWriter.join(path, durable=False)
    assert writer is not None
    for k in range(writer.n_slabs):
        slab: dict[str, Any] = {}
        for name, spec in arrays(writer.plan).items():
            if spec.has_slab(k):
                shape = (2, *spec.shape[1:]) if spec.per == "image" else spec.shape[1:]
                slab[name] = rng.integers(1, 99, shape).astype(spec.dtype)
        ones = {"valid": np.ones(2, np.uint8), "n_valid": np.array(2)}
        writer.write_slab(k, {**slab, **ones}, {"command": "damage trials"})
    assert writer.finish()


def read(path: Path) -> dict[str, object]:
    """All that a reader gets of a store, None for what it refuses."""
    store = open_store(path)
    parts: dict[str, Callable[[], object]] = {"manifest": store.manifest.to_json}
    for name, spec in store.arrays.items():
        if spec.per == "once":
            parts[name] = lambda name=name: store.array(name)[...].tobytes()  # type: ignore[misc]
        elif spec.per != "commit":
            for k in range(spec.shape[0] if spec.per == "slab" else store.n_slabs):
                rows = slice(k, k + 1) if spec.per == "slab" else store.plan.rows(k)
                parts[f"{name} {k}"] = lambda name=name, rows=rows: store.array(name)[  # type: ignore[misc]
                    rows
                ].tobytes()
    parts["samples"] = lambda: [store.samples.id.tolist(), store.samples.label.tolist()]
    found: dict[str, object] = {}
    for what, part in parts.items():
        try:
            found[what] = part()
        except VitseeError:
            found[what] = None
    return found


def main() -> None:
    """Prints how the trials of each kind ended."""
    parser = argparse.ArgumentParser(description="Damage stores, and see what finds it.")
    parser.add_argument("trials", type=int, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--grown", action="store_true", help="stores of three generations"
    )
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="damage-") as folder:
        trials = Trials(Path(folder), arguments.seed, arguments.grown)
        for kind in KINDS:
            ended = trials.run(kind, arguments.trials)
            print(
                f"{kind}: "
                + ", ".join(f"{what} {n}" for what, n in sorted(ended.items()))
            )
            failed |= ended["validate --deep finds"] < ended["trials"]
            failed |= "readers: other numbers" in ended
    sys.exit(failed)


if __name__ == "__main__":
    main()
