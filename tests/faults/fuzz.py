"""Changed manifests, markers, checksums and samples, as damage or malice could leave them: what
reads a store must end with a result or one line, at once, in little memory, and within the store.

    python -m tests.faults.fuzz 100000 [--seed 0] [--generation 3]

Digests and checksums are made anew after most changes, so that what lies behind them is met. Prints
how the variants ended; exit code 1 where one ended in a traceback, took more than 20 seconds, or
opened a file outside.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import shutil
import signal
import sys
import sysconfig
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from tests.grown_stores import add_images, add_sites
from vitsee_stores import (
    Samples,
    SiteSpec,
    StorePlan,
    StoreWriter,
    TokenLayout,
    describe,
    metadata,
    open_store,
    validate,
)
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import AttentionGroup, ErfPlan, arrays
from vitsee_stores.manifest import ATTRIBUTE, new_manifest
from vitsee_stores.plan import Canvas

SECONDS, MEMORY = 20, 2 << 30
NAMES = ("commits/c.0.0", "commits/c.1.0", "checksums/c.0.0", "checksums/c.1.0")
DEEP = "lists in lists"  # made in the text: Python cannot copy what is nested that deeply
SAMPLES = ("samples/index", "samples/label", "samples/split", "samples/id")
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 2**31, 2**62, 10**12, 10**300, 0.5, -0.5, 1e308),
    *(
        "",
        "x",
        "..",
        "../../../etc/passwd",
        "/etc/passwd",
        "a/b",
        "a\0b",
        "\x1b[31m",
        "=1+1",
    ),
    *("\ud800", "x" * 5000, "zarr.json", "c", "none", "float64", "9" * 400),
    *([], {}, [[]], [0, 0], [1e9, 1e9], {"": {}}, ["..", "/"]),
)


class Hang(BaseException):
    """A variant took too long."""


def make_store(path: Path, commit: bool = True) -> None:
    """A small store with most kinds of arrays: two slabs of two images, written unless not
    `commit`."""
    layout = TokenLayout(("cls",), (1, 2), stride_px=(8.0, 8.0))
    site = SiteSpec(
        "b.0.out", "out", "b.0", ("blocks",), "tokens", 2, (3, 2), layout, 0, 0.5
    )
    alias = SiteSpec(
        "b.1.in", "in", "b.1", (), "tokens", 2, (3, 2), layout, 0, 0.5, alias_of="b.0.out"
    )
    vector = SiteSpec(
        "logits", "logits", None, ("head",), "vector", 3, (3,), None, 1, 1.0
    )
    plan = StorePlan(
        4,
        2,
        "none",
        (site, alias, vector),
        (AttentionGroup("", ("b.0",), (2,), layout),),
        "rows",
        rollout=True,
        sublayers=(("b.0.mlp", layout),),
        inputs=(3, 2, 2),
        weights=(("filters", (2, 1)),),
        places=(("b.0", 0, 0.5),),
        grams=True,
        erf=ErfPlan(2, ("b.0.out",), (2, 2)),
        canvas=Canvas((2, 2), 2, 1),
    )
    boxes = np.array([[0, 0, 4, 4], [np.nan] * 4, [1, 0, 3, 2], [0, 1, 2, 9]], np.float32)
    labels = np.array([0, 1, -1, 0])
    samples = Samples(np.arange(4), list("abcd"), labels, ["s", "s", "", ""], boxes)
    manifest = new_manifest(
        {
            "model": {"name": "m", "args": {}},
            "seed": 0,
            "order": "shuffled",
            "precision": "fp32",
        },
        plan,
        samples,
        model={
            "name": "m",
            "architecture": "m",
            "args": {"a": 1},
            "input_size": [3, 2, 2],
            "n_params": 5,
            "weights": {"source": "random", "seed": 0, "missing": ["x"]},
        },
        transform={"mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9},
        class_names=["p", "q"],
        selfcheck={"output": 0.0},
        left_out={"b.1.mlp": "why"},
        info={"data": {"data": "x", "split": None}, "versions": {"vitsee": "0"}},
    )
    specs = arrays(manifest.plan)
    once = {"weights/filters": np.ones((2, 1), np.float32)}
    writer = StoreWriter.create_or_join(path, manifest, samples, once, durable=False)
    for k in range(2 if commit else 0):
        slab = {
            name: np.ones(
                (2, *spec.shape[1:]) if spec.per == "image" else spec.shape[1:],
                spec.dtype,
            )
            for name, spec in specs.items()
            if spec.has_slab(k)
        }
        writer.write_slab(
            k, {**slab, "n_valid": np.array(2)}, {"command": "fuzz", "host": "h"}
        )
    writer.finish()


def grow(path: Path) -> None:
    """Add a site to the small store, then three images."""
    layout = open_store(path).plan.sites[0].layout
    site = SiteSpec("b.0.norm1", "norm1", "b.0", (), "tokens", 2, (3, 2), layout, 0, 0.5)
    add_sites(path, [site])
    add_images(path, 3)


class Changes:
    """Random changes of bytes and of JSON."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def noise(self, body: bytes) -> bytes:
        """A few bytes changed, lost or added."""
        data, rng = bytearray(body), self.random
        for _ in range(rng.choice((1, 4, 16))):
            data[rng.randrange(len(data))] = rng.choice((0, 255, 128, rng.randrange(256)))
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        if rng.random() < 0.1:
            data += rng.randbytes(8)
        return bytes(data)

    def change(self, tree: Any) -> None:
        """One change somewhere in a tree of lists and objects."""
        places = [tree]
        for place in places:
            inner = place.values() if isinstance(place, dict) else place
            places += [item for item in inner if isinstance(item, (dict, list)) and item]
        place, rng = self.random.choice(places), self.random
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key, action = rng.choice(keys), rng.randrange(7)
        if action == 0:
            del place[key]
        elif action == 1 and isinstance(place, dict):
            place[f"{key}x"] = place[key]
        elif action == 1:
            place.append(copy.deepcopy(place[key]))
        elif action == 2 and isinstance(place[key], (int, float)):
            place[key] = rng.choice(
                (place[key] + 1, place[key] - 1, place[key] * 10**6, -place[key])
            )
        elif action == 3:
            other = rng.choice(places)
            if isinstance(other, dict):
                place[key] = copy.deepcopy(rng.choice(list(other.values())))
        elif action == 4 and rng.random() < 0.2:
            place[key] = DEEP
        elif action == 4:
            deep: Any = rng.choice(VALUES)
            for _ in range(rng.choice((1, 5, 40))):
                deep = [deep]
            place[key] = deep
        else:
            place[key] = copy.deepcopy(rng.choice(VALUES))


class Fuzzer(Changes):
    """Variants of one small store in `folder`, and what reads them; `readers`: more that do, each
    twentieth variant. generation: the one that is changed, of three if it is not the first."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        readers: dict[str, Callable[[Path], object]],
        generation: int = 1,
    ):
        super().__init__(seed)
        self.store = folder / "fuzzed.zarr"
        make_store(self.store)
        if generation > 1:
            grow(self.store)
        self.at = (
            self.store
            if generation == 1
            else self.store / "generations" / str(generation)
        )
        own: dict[str, Callable[[Path], object]] = {
            **{"open": read_everything, "describe": describe, "validate": check}
        }
        self.readers = own | readers
        self.rarely = set(readers)
        self.files = {
            name: (self.at / name).read_bytes()
            for name in (
                "zarr.json",
                *NAMES,
                *(f"{name}/{self._chunk(name)}" for name in SAMPLES),
            )
        }
        self.root = json.loads(self.files["zarr.json"])

    def run(self, n: int) -> Counter[str]:
        """How `n` variants ended, by reader; those with a fault print how."""
        ended: Counter[str] = Counter()
        for number in range(n):
            changed = self.random.choice(
                [self.manifest] * 6 + [self.marker, self.samples]
            )()
            for name, reader in self.readers.items():
                if name in self.rarely and number % 20:
                    continue
                ended[f"{name}: {self.read(name, reader, number)}"] += 1
            for file in changed:
                (self.at / file).write_bytes(self.files[file])
        return ended

    def read(self, name: str, reader: Callable[[Path], object], number: int) -> str:
        """One reader on the variant as it is."""
        try:
            with limited(self.store) as outside:
                reader(self.store)
            said = ""
        except VitseeError as error:
            said = str(error)
        except Hang:
            return self.fault(name, number, "hang")
        except BaseException as error:
            traceback.print_exc()
            return self.fault(name, number, f"traceback {type(error).__name__}")
        if outside:
            return self.fault(name, number, f"opened {outside[0]}")
        if "\n" in said:
            return self.fault(name, number, "more than one line")
        return "one line" if said else "read"

    def fault(self, reader: str, number: int, what: str) -> str:
        """A fault, with the variant kept beside the store."""
        kept = self.store.with_name(f"fault-{number}-{reader}.zarr")
        if not kept.exists():
            shutil.copytree(self.store, kept)
        print(f"variant {number}, {reader}: {what}: {kept}", file=sys.stderr)
        return f"FAULT {what}"

    def manifest(self) -> list[str]:
        """One to three changes of the manifest; mostly with a new digest."""
        document = copy.deepcopy(self.root)
        for _ in range(self.random.choice((1, 1, 2, 3))):
            self.change(document["attributes"].get(ATTRIBUTE) or document)
        data = document["attributes"].get(ATTRIBUTE)
        if isinstance(data, dict) and self.random.random() < 0.9:
            with suppress(ValueError):
                document["attributes"][ATTRIBUTE] = metadata.with_digest(data)
        depth = self.random.choice((100, 1000, 10**5))
        text = json.dumps(document).encode()
        text = text.replace(json.dumps(DEEP).encode(), b"[" * depth + b"]" * depth)
        if self.random.random() < 0.05:
            text = self.noise(text)
        (self.at / "zarr.json").write_bytes(text)
        return ["zarr.json"]

    def marker(self) -> list[str]:
        """Another marker or row of checksums, with a sound checksum of its own."""
        name = self.random.choice(NAMES)
        body = self.files[name][:-4]
        if name.startswith("commits") and self.random.random() < 0.7:
            held = json.loads(body)
            self.change(held)
            body = (
                json.dumps(held)
                .encode()
                .ljust(4096)[: self.random.choice((4096, 4096, 100))]
            )
        else:
            body = self.noise(body)
        self.put(name, body)
        return [name]

    def samples(self) -> list[str]:
        """Other samples, sealed by the manifest."""
        document = copy.deepcopy(self.root)
        data = document["attributes"][ATTRIBUTE]
        path = self.random.choice(SAMPLES)
        name = f"{path}/{self._chunk(path)}"
        body = self.noise(self.files[name][:-4])
        data["checksums"][path] = self.put(name, body)
        if self.random.random() < 0.3:
            self.change(data["plan"])
        text = json.dumps(
            {**document, "attributes": {ATTRIBUTE: metadata.with_digest(data)}}
        )
        (self.at / "zarr.json").write_text(text)
        return ["zarr.json", name]

    def put(self, name: str, body: bytes) -> int:
        """A chunk with its checksum, which is returned."""
        value = int(google_crc32c.value(body))
        (self.at / name).write_bytes(body + value.to_bytes(4, "little"))
        return value

    def _chunk(self, path: str) -> str:
        return "c.0.0" if path == "samples/id" else "c.0"


def read_everything(path: Path) -> None:
    """What a store that opens is asked for by every analysis."""
    store = open_store(path, allow_partial=True)
    _ = (
        store.samples.id,
        store.samples.split,
        [store.revision_of(name) for name in store.sites],
    )
    for slab in store.slabs():
        slab.valid.sum()
    for name in store.arrays:
        array = store.array(name)
        if array.size_bytes < 1 << 20:
            try:
                array[:1]
            except VitseeError:
                continue
    for site in store.sites:
        store.layout(site)
    if store.has("input"):
        store.inputs()


def check(path: Path) -> None:
    """Both kinds of validation; every finding is one line."""
    for deep in (False, True):
        assert not any("\n" in line for line in validate(path, deep))


def info(path: Path) -> None:
    """`vitsee info` for people and as JSON."""
    from click.testing import CliRunner

    from vitsee_cli.main import main as vitsee

    for more in ([], ["--json"]):
        result = CliRunner().invoke(vitsee, ["info", str(path), *more])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code:
            assert result.exit_code == 1 and not result.stdout, result.output
            raise VitseeError(result.stderr.strip())


_outside: list[str] = []
_allowed: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _allowed is not None and event in (
        "open",
        "os.listdir",
        "os.scandir",
        "os.remove",
    ):
        path = arguments[0]
        if isinstance(path, (str, bytes, os.PathLike)):
            place = os.path.realpath(os.fsdecode(path))
            if not place.startswith(tuple(_allowed)):
                _outside.append(place)


@contextmanager
def limited(store: Path) -> Iterator[list[str]]:
    """Twenty seconds, and a list of what is opened outside the store and Python itself."""
    global _allowed

    def late(*_: object) -> None:
        raise Hang

    _outside.clear()
    _allowed = [os.path.realpath(store), os.path.realpath(sys.prefix), sys.base_prefix]
    _allowed += [
        *sysconfig.get_paths().values(),
        str(Path(__file__).parents[2]),
        "/proc",
        "/dev",
    ]
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield _outside
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        _allowed = None


sys.addaudithook(_watch)


def main() -> None:
    """Prints how the variants ended."""
    parser = argparse.ArgumentParser(description="Fuzz what reads a store.")
    parser.add_argument("variants", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--generation", type=int, default=1)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    folder = Path(tempfile.mkdtemp(prefix="fuzz-store-"))
    readers: dict[str, Callable[[Path], object]] = {"vitsee info": info}
    fuzzer = Fuzzer(folder, arguments.seed, readers, arguments.generation)
    ended = fuzzer.run(arguments.variants)
    for what, count in sorted(ended.items()):
        print(f"{what:40} {count}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{arguments.variants} variants, seed {arguments.seed}, peak memory {peak:.0f} MiB"
    )
    if any("FAULT" in what for what in ended):
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
