"""Every file that a command reads, damaged: the numbers of before, or a refusal that names it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.extractions import VIT, extracted, plant_images
from tests.faults.conftest import Ends
from tests.faults.trials import seeds
from vitsee_cli.main import main
from vitsee_stores import StoreError, disk, folder, validate

DAMAGES = ("flip", "flip", "cut", "empty")
KINDS_AT_ONCE = 25  # of array, in `make test-all`; each seed takes other ones
# Asked for by an option, or where fuller arrays are absent; `damage.py` reads every array.
UNREAD = {
    *("attention/cls_rows/c", "attention/n_queries/c", "grams/embed/all/c"),
}
# S is the damaged store, T a sound one of the same model and other images.
COMMANDS = [
    "info S --json",
    "attn-dist S",
    "attn-map S --kind mean-cls",
    "attn-map S --kind mean-spatial",
    "attn-map S --kind aligned",
    "attn-map S --kind rollout",
    "attn-map S --kind prefix-mass",
    "attn-map S --kind entropy",
    "attn-map S --kind sink",
    "attn-map S --image 3",
    "head-types S",
    "cka S --no-cache",
    "cka S --sites norms",
    "cka S --no-cache --sites * --tokens mean",
    "cka S --no-cache --sites * --tokens cls",
    "cluster S --seeds 1",
    "erf S",
    "knn S T --k 3",
    "knn T S --k 3",
    "probe S T",
    "lens S",
    "localize S",
    "logit-attribution S",
    "normratio S",
    "norms S",
    "similarity S --no-cache",
    "spatial S",
    "spectrum S",
    "weights S",
]


def damaged(data: bytes, how: str, rng: random.Random) -> bytes:
    """The bytes of a file after damage; always others."""
    if how == "empty" or not data:
        return b"" if data else b"\0"
    if how == "cut":
        return data[: rng.randrange(len(data))]
    while True:
        place = rng.randrange(8 * len(data))
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        if not says_the_same(bytes(changed), data):
            return bytes(changed)


def says_the_same(a: bytes, b: bytes) -> bool:
    """Whether two texts are one JSON document, as after a flip from a space to a line's end."""
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


def invoke(words: str, names: dict[str, Path]) -> Result:
    return CliRunner().invoke(
        main, [str(names.get(word, word)) for word in words.split()]
    )


class Stores:
    """Two stores, what every command prints of them, and which files of S it opens."""

    def __init__(self, place: Path, images: Path):
        self.names = {"S": place / "s.zarr", "T": place / "t.zarr"}
        kept = ["--sites", "blocks", "--sites", "head", "--attention", "full", "--grams"]
        kept += ["--erf", "6", "--inputs", "--sites", "norms", "--tokens", "norms=pooled"]
        kept += ["--sites", "*.branch", "--tokens", "*.branch=pooled"]
        for (name, path), chosen in zip(
            self.names.items(), ("first", "second"), strict=True
        ):
            (place / name).mkdir()
            for image in sorted(images.rglob("*.png"))[chosen == "second" :: 2]:
                target = place / name / image.parent.name / image.name
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(image.read_bytes())
            extracted(*VIT, "--data", place / name, "-o", path, "--slab", 4, *kept)
        self.store = self.names["S"]
        self.clean: dict[str, str] = {}
        self.opened: dict[str, set[str]] = {}
        for words in COMMANDS:
            files: set[str] = set()
            with self.noting(files):
                result = invoke(words, self.names)
            assert result.exit_code == 0, (words, result.stderr)
            self.clean[words], self.opened[words] = result.stdout, files

    @contextmanager
    def noting(self, files: set[str]) -> Iterator[None]:
        """A context that adds the names of the files of S that are opened."""
        real, start = disk.open_regular, f"{self.store}/"

        def noted(path: str | Path) -> int:
            if str(path).startswith(start):
                files.add(str(path).removeprefix(start))
            return real(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk, "open_regular", noted)
            patch.setattr(folder, "open_regular", noted)
            yield

    def kinds(self) -> list[str]:
        """Arrays and documents by kind: those of one site or block stand for all."""
        files = sorted(
            str(p.relative_to(self.store)) for p in self.store.rglob("*") if p.is_file()
        )
        return sorted({kind_of(name) for name in files})

    def one_of(self, kind: str, rng: random.Random) -> str:
        files = sorted(
            str(p.relative_to(self.store)) for p in self.store.rglob("*") if p.is_file()
        )
        return rng.choice([name for name in files if kind_of(name) == kind])


def kind_of(name: str) -> str:
    """`acts/blocks.3.out/grid/c.0.0.0.0` -> `acts/SITE/grid/c`."""
    parts = name.split("/")
    if parts[-1] == "zarr.json":
        return (
            "zarr.json" if len(parts) == 1 else "ARRAY/zarr.json"
        )  # that validate alone reads
    parts[-1] = "c"
    return "/".join("SITE" if "." in part else part for part in parts)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    images = plant_images(tmp_path_factory.mktemp("images"), 24)
    return Stores(tmp_path_factory.mktemp("stores"), images)


@pytest.mark.slow
def test_nearly_every_kind_of_array_is_read_by_some_command(stores: Stores) -> None:
    """Else the trials below would prove less than they say."""
    read = {kind_of(name) for files in stores.opened.values() for name in files}
    assert {kind for kind in stores.kinds() if kind.endswith("/c")} - read == UNREAD


@pytest.mark.fault("a file of a store flipped, cut or emptied")
@seeds(1)
def test_commands_refuse_what_is_damaged(stores: Stores, seed: int, ended: Ends) -> None:
    kinds, rng = stores.kinds(), random.Random(seed)
    first = seed * KINDS_AT_ONCE
    for i in range(first, first + KINDS_AT_ONCE):
        name, how = stores.one_of(kinds[i % len(kinds)], rng), rng.choice(DAMAGES)
        path = stores.store / name
        before = path.read_bytes()
        path.write_bytes(damaged(before, how, rng))
        try:
            for outcome in outcomes(stores, name):
                ended(outcome)
        finally:
            path.write_bytes(before)


def outcomes(stores: Stores, name: str) -> Iterator[str]:
    """How each command that opened this file ends now that it is damaged."""
    for words in COMMANDS:
        if name not in stores.opened[words]:
            continue
        result = invoke(words, stores.names)
        said = result.stderr.strip()
        if result.exit_code == 0 and words == "info S --json":
            now, before = json.loads(result.stdout), json.loads(stores.clean[words])
            if now["missing"]:
                assert kind_of(name) == "commits/c" and not now["complete"]
                yield "missing, says info"
                continue
            assert now == {key: now[key] and value for key, value in before.items()}
            yield "same numbers" if now == before else "left out by info"
        elif result.exit_code == 0:
            assert result.stdout == stores.clean[words], (words, name)
            yield "same numbers"
        else:
            assert (result.exit_code, result.stdout) == (1, ""), (
                words,
                name,
                result.output,
            )
            assert "Traceback" not in said and is_named(name, said), (words, name, said)
            yield "refused by name"
    try:
        found = "\n".join(validate(stores.store, deep=True))
    except StoreError as error:
        found = str(error)
    assert is_named(name, found), (name, found)


def is_named(name: str, text: str) -> bool:
    """Whether a file of the store is: by its path, or by its array and its own name."""
    array, _, file = name.rpartition("/")
    if not array:
        return name in text or ": the manifest is damaged: " in text
    if array == "commits" and f"no sound marker of slab {file.split('.')[1]}" in text:
        return True
    lines = [
        line
        for line in text.splitlines()
        if f"{array}:" in line or f"{array}, slab" in line
    ]
    return name in text or any(f" {file} " in line for line in lines)
