"""Tables, studies and annotation files as other programs, damage or malice could leave them: each
is read, or refused in one line, at once, and nothing is written but where it was asked for.

    python -m tests.faults.foreign tables 2000 [--seed 0]      (or studies, annotations)

Prints how the variants ended; exit code 1 where one ended in a traceback, took more than 20
seconds, or would have written elsewhere. A library that ends the process leaves its file in the
folder that is printed first.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gzip
import io
import json
import resource
import signal
import sys
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import polars as pl
from PIL import Image

from tests.faults.fuzz import DEEP, Changes, Hang
from vitsee_cli.main import main as vitsee
from vitsee_cli.recipe_steps import check_steps
from vitsee_core.features.array_files import read_arrays, read_ids
from vitsee_core.study.recipe_file import read_recipe
from vitsee_core.study.recipe_plan import plan_recipe
from vitsee_core.study.steps import Study
from vitsee_core.tables.results import read_result
from vitsee_core.truth.masks import open_masks
from vitsee_core.truth.masks.class_maps import open_class_maps
from vitsee_stores.errors import VitseeError

SECONDS, MEMORY = 20, 6 << 30
CELLS = (
    *(
        "1",
        "-2.5",
        "1,5",
        "1.234,5",
        "1_000",
        "nan",
        "inf",
        "-Infinity",
        "NA",
        "",
        " ",
        " 3 ",
    ),
    *(
        "x",
        '"',
        '""',
        '"a',
        'a"b',
        "'=1+1",
        "=1+1",
        "\t",
        ";",
        "|",
        ",",
        "\0",
        "\ufeff",
        "é",
        "\ud7ff",
    ),
    *(
        "9" * 400,
        "1e400",
        "x" * 200_000,
        "a\nb",
        "a\rb",
        "true",
        "None",
        "0x10",
        "١٢",
        "[1, 2]",
    ),
)
NAMES = (
    "store",
    "site",
    "metric",
    "value",
    "id",
    "label",
    "row",
    "",
    " v",
    "v",
    "depth",
    "x" * 300,
)


class Foreign(Changes, ABC):
    """Variants of one kind of file in a folder; `variant` writes one, `read` reads it."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(seed)
        self.folder = folder

    @abstractmethod
    def variant(self) -> Path:
        """Write a variant."""

    @abstractmethod
    def readers(self) -> dict[str, Callable[[Path], object]]:
        """Return the functions that read a variant, by name."""

    def run(self, n: int) -> Counter[str]:
        """How `n` variants ended, by reader; those with a fault are kept and printed."""
        ended: Counter[str] = Counter()
        for number in range(n):
            path = self.variant()
            for name, reader in self.readers().items():
                how = self._ended(reader, path)
                if how.startswith("FAULT"):
                    kept = path.with_name(f"fault-{number}-{path.name}")
                    kept.write_bytes(path.read_bytes())
                    print(f"variant {number}, {name}: {how}: {kept}", file=sys.stderr)
                ended[f"{name}: {how}"] += 1
        return ended

    def _ended(self, reader: Callable[[Path], object], path: Path) -> str:
        def late(*_: object) -> None:
            raise Hang

        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            reader(path)
        except VitseeError as error:
            text = str(error)
            return (
                "one line"
                if "\n" not in text and len(text) < 2000
                else f"FAULT says {text[:200]!r}"
            )
        except Hang:
            return "FAULT hang"
        except BaseException as error:
            traceback.print_exc()
            return f"FAULT traceback {type(error).__name__}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return "read"


class Tables(Foreign):
    """Result tables and imports: written in many ways, then damaged."""

    def variant(self) -> Path:
        rng = self.random
        ending = rng.choice(
            (".csv", ".csv", ".csv", ".tsv", ".csv.gz", ".json", ".parquet")
        )
        data = self._sound(ending) if rng.random() < 0.6 else self._odd(ending)
        if rng.random() < 0.4:
            data = self.noise(data) if data else data
        if rng.random() < 0.1 and len(data) > 2:
            first, last = sorted(rng.sample(range(len(data)), 2))
            data = data[:first] + data[last:]
        path = self.folder / f"t{ending}"
        path.write_bytes(data)
        return path

    def readers(self) -> dict[str, Callable[[Path], object]]:
        return {"result": read_result, "import": _import, "ids": _ids}

    def _frame(self) -> pl.DataFrame:
        rng, n = self.random, self.random.randrange(40)
        odd = rng.choice((None, float("nan"), 0.0, 1e300))
        columns: dict[str, Any] = {
            "id": [f"image {i}" for i in range(n)],
            rng.choice(("site", "label")): [
                rng.choice(("a", "b, c", "é")) for _ in range(n)
            ],
            "value": [rng.choice((odd, rng.random())) for _ in range(n)],
            "row": list(range(n)),
        }
        if rng.random() < 0.2:
            columns["lists"] = [[1.0] * rng.choice((2, 2, 3)) for _ in range(n)]
        if rng.random() < 0.2:
            columns["odd"] = [rng.choice((True, None)) for _ in range(n)]
        return pl.DataFrame(columns)

    def _sound(self, ending: str) -> bytes:
        frame, buffer = self._frame(), io.BytesIO()
        if ending == ".parquet":
            compression = self.random.choice(
                ("zstd", "uncompressed", "snappy", "gzip", "lz4")
            )
            frame.write_parquet(buffer, compression=compression)  # type: ignore[arg-type]
            return buffer.getvalue()
        if ending == ".json":
            return b"[" + b",".join(frame.write_ndjson().encode().splitlines()) + b"]"
        flat = frame.drop("lists", strict=False)
        flat.write_csv(buffer, separator=self.random.choice(",;\t|"))
        data = buffer.getvalue()
        data = data.replace(
            b"\n", self.random.choice((b"\n", b"\n", b"\r\n", b"\r", b"\n\n"))
        )
        return gzip.compress(data) if ending == ".csv.gz" else data

    def _odd(self, ending: str) -> bytes:
        rng = self.random
        width = rng.randrange(1, 6)
        rows = [[rng.choice(NAMES) for _ in range(width)]]
        for _ in range(rng.randrange(6)):
            rows.append([rng.choice(CELLS) for _ in range(width + (rng.random() < 0.05))])
        if ending == ".json":
            records = [dict(zip(rows[0], row, strict=False)) for row in rows[1:]]
            return json.dumps(records).encode()
        separator = rng.choice(",;\t|")
        quote = rng.choice(("", "", '"'))
        lines = [separator.join(f"{quote}{cell}{quote}" for cell in row) for row in rows]
        text = rng.choice(("\n", "\r\n", "\r")).join(lines)
        encoding = rng.choice(
            ("utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1")
        )
        data = text.encode(encoding, "replace")
        return gzip.compress(data) if ending == ".csv.gz" else data


def _import(path: Path) -> None:
    arrays = read_arrays(path)
    n_rows = {len(values) for values in arrays.values.values()}
    assert len(n_rows) == 1, n_rows


def _ids(path: Path) -> None:
    ids, labels = read_ids(path)
    assert labels is None or len(labels) == len(ids)


STUDY: dict[str, Any] = {
    "title": "A study", "note": "n", "left_out": "",
    "data": {"pictures": "a folder"},
    "words": {"both": ["a.zarr", "b.zarr"], "few": "--images 24 --attention none"},
    "quick": {"--data pictures/val": "--data demo:test"},
    "stores": {
        "a": {"model": "m", "options": "--data pictures/val {few}", "quick": "demo:vit"},
        "b": {"model": "m", "options": "--data pictures/val --replace cls@last=mean:a.zarr",
              "quick": "demo:resnet"},
    },
    "figures": [
        {"names": "2", "commands": ["cka {both} --sites last", "norms a.zarr -o n.csv"],
         "note": "", "printed": [{"what": "w", "paper": 0.5, "result": "n",
                                  "where": {"metric": "l2"}}]},
        {"names": "1", "commands": ["probe a.zarr --holdout 0.5 -o p.csv", "best-layer p.csv"]},
    ],
}  # fmt: skip
# Texts that a stranger may put anywhere.
HOSTILE = (
    *(
        "../../x",
        "/tmp/elsewhere/x",
        "..",
        ".",
        "~/x",
        "a\\b",
        "CON",
        "a.zarr",
        "../a.zarr",
        "-o",
        "--",
    ),
    *(
        "-o /tmp/elsewhere/x.csv",
        "norms a.zarr -o ../../../x.csv",
        "norms a.zarr -o",
        "",
        " ",
        "'",
    ),
    *(
        "norms a.zarr -o/tmp/elsewhere/x.csv",
        "norms a.zarr --output=/tmp/elsewhere/x.csv",
    ),
    *(
        "norms a.zarr --png /tmp/elsewhere/x.png",
        "concepts a.zarr --save /tmp/elsewhere/x.npz",
    ),
    *(
        "cka a.zarr ../../other",
        "cka a.zarr b.zarr --cache /tmp/elsewhere",
        "{few}",
        "{none}",
        "{",
    ),
    *(
        "norms a.zarr -qo /tmp/elsewhere/x.csv",
        "best-layer p.csv --table /tmp/elsewhere/t.csv",
    ),
    *("norms s3://bucket/x.zarr", "retrieve a.zarr --export-queries /tmp/elsewhere/q"),
    *(
        "/bin/true",
        "export a.zarr -o /tmp/elsewhere/x.npy",
        "cache --remove /tmp/elsewhere",
    ),
    *(
        "--data demo:test -o /tmp/elsewhere/x",
        "--data demo:test --erf x",
        "--data demo:test --images x",
    ),
    *(
        "--data pictures/val --force",
        "--data pictures/../../../etc",
        "\x1b[31m",
        "\u202e",
        "x" * 5000,
    ),
)
DATES = (
    "1979-05-27",
    "07:32:00",
    "1979-05-27T07:32:00Z",
    "inf",
    "nan",
    "-0",
    "0x10",
    "9" * 30,
)


class Studies(Foreign):
    """Studies in files: hostile words in every place, then damage of the text."""

    def variant(self) -> Path:
        rng, tree = self.random, copy.deepcopy(STUDY)
        for _ in range(rng.choice((1, 1, 2, 3))):
            if rng.random() < 0.5:
                self._hostile(tree)
            else:
                self.change(tree)
        text = "\n".join(
            f"{_toml(key)} = {self._value(value)}" for key, value in tree.items()
        )
        data = text.encode("utf-8", "replace")
        if rng.random() < 0.15:
            data = self.noise(data)
        path = self.folder / "study.toml"
        path.write_bytes(data)
        return path

    def readers(self) -> dict[str, Callable[[Path], object]]:
        return {"plan": self._plan}

    def _hostile(self, tree: Any) -> None:
        """Put a hostile text in place of a value or of a key."""
        places = [tree]
        for place in places:
            inner = place.values() if isinstance(place, dict) else place
            places += [item for item in inner if isinstance(item, (dict, list)) and item]
        place, rng = self.random.choice(places), self.random
        key = rng.choice(
            list(place) if isinstance(place, dict) else list(range(len(place)))
        )
        if isinstance(place, dict) and rng.random() < 0.3:
            place[rng.choice(HOSTILE)] = place.pop(key)
        else:
            place[key] = rng.choice(HOSTILE)

    def _value(self, value: Any) -> str:
        rng = self.random
        if value == DEEP:
            return "[" * rng.choice((100, 100_000))
        if rng.random() < 0.01:
            return rng.choice(DATES)
        if rng.random() < 0.003:
            return "{ " + "a." * rng.choice((10, 50_000)) + "a = 1 }"
        if isinstance(value, dict):
            items = (
                f"{_toml(str(key))} = {self._value(item)}" for key, item in value.items()
            )
            return "{ " + ", ".join(items) + " }"
        if isinstance(value, list):
            return "[" + ", ".join(self._value(item) for item in value) + "]"
        if isinstance(value, (bool, int, float)) or value is None:
            return json.dumps(value)
        return _toml(str(value))

    def _plan(self, path: Path) -> None:
        """What the command does before its work, on the demo's images; every place that a step
        names for writing is below the study's folder."""
        folder = self.folder / "out"
        recipe = read_recipe(str(path)).with_demo_models()
        study = Study(folder, {}, "")
        steps = plan_recipe(recipe, study, None).steps
        with click.Context(vitsee, info_name="vitsee") as ctx:
            check_steps(ctx, study, steps)
        assert not folder.exists()
        for step in steps:
            assert all(_is_below(output, folder) for output in step.outputs), step
            for option, value in zip(step.words, step.words[1:], strict=False):
                if option in ("-o", "--output", "--png", "--save", "--cache", "--table"):
                    assert _is_below(Path(value), folder), step
            assert not any(
                "elsewhere" in word for word in step.words if word[:1] == "-"
            ), step


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _toml(text: str) -> str:
    return json.dumps(text)


SQUARE = [[1, 1, 3, 1, 3, 3, 1, 3]]
SHAPES: tuple[Any, ...] = (
    *(
        SQUARE,
        [],
        None,
        "",
        "x",
        [[]],
        [[0.1, 0.1, 0.5, 0.1, 0.5, 0.5]],
        [[1, 1, 3]],
        [1, 1, 3, 3],
    ),
    *(
        {"counts": [20, 4], "size": [4, 6]},
        {"counts": "h0", "size": [4, 6]},
        {"counts": "P" * 50},
    ),
    *({"counts": [10**10], "size": [10**5, 10**5]}, {"counts": [24], "size": ["4", "6"]}),
    *([[1e308, 1, 3, 1, 3, 3]], [[float("nan")] * 6], [["1", "1", "3", "1", "3", "3"]]),
)


class Annotations(Foreign):
    """COCO files of objects and panoptic ones: entries changed, merged and damaged."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        (folder / "a").mkdir(exist_ok=True)
        colours = np.zeros((4, 6, 3), np.uint8)
        colours[1:3, 1:3] = 5, 0, 0
        Image.fromarray(colours).save(folder / "a" / "a.png")

    def variant(self) -> Path:
        rng = self.random
        images = [
            {"id": i, "file_name": f"{i}.jpg", "height": 4, "width": 6} for i in (1, 2)
        ]
        categories = [
            {"id": i, "name": name, "isthing": 1} for i, name in ((1, "cat"), (2, "dog"))
        ]
        if rng.random() < 0.3:
            segments = [{"id": 5, "category_id": 1, "iscrowd": 0}]
            annotations = [
                {"image_id": 1, "file_name": "a.png", "segments_info": segments}
            ]
        else:
            annotations = [
                {"id": k, "image_id": rng.choice((1, 2, "1", 2, 7)), "category_id": 1 + k % 2,
                 "segmentation": rng.choice(SHAPES) if k == 2 else SQUARE,
                 "iscrowd": rng.choice((0, 1, "0", "1", None))}
                for k in range(3)
            ]  # fmt: skip
        tree = {"images": images, "annotations": annotations, "categories": categories}
        for _ in range(rng.choice((0, 1, 1, 2))):
            self.change(tree)
        text = json.dumps(tree).replace(
            json.dumps(DEEP), "[" * rng.choice((100, 100_000))
        )
        path = self.folder / "a.json"
        path.write_bytes(
            self.noise(text.encode()) if rng.random() < 0.1 else text.encode()
        )
        return path

    def readers(self) -> dict[str, Callable[[Path], object]]:
        return {"masks": _read_masks, "class maps": _read_class_maps}


def _read_masks(path: Path) -> None:
    source = open_masks(path)
    for i in range(len(source.keys)):
        labels = source.read(i)
        assert all(one.mask.shape == labels.shape for one in source.segments(i))


def _read_class_maps(path: Path) -> None:
    source = open_class_maps(path)
    for i in range(len(source.keys)):
        assert source.read(i).dtype == np.uint8


KINDS: dict[str, type[Foreign]] = {
    "tables": Tables,
    "studies": Studies,
    "annotations": Annotations,
}


def main() -> None:
    """Prints how the variants of one kind ended."""
    parser = argparse.ArgumentParser(description="Fuzz what reads files of others.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("variants", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    folder = Path(tempfile.mkdtemp(prefix=f"foreign-{arguments.kind}-"))
    print(folder)
    ended = KINDS[arguments.kind](folder, arguments.seed).run(arguments.variants)
    for how, count in sorted(ended.items()):
        print(f"{how:40} {count}")
    if any("FAULT" in how for how in ended):
        sys.exit(1)


if __name__ == "__main__":
    main()
