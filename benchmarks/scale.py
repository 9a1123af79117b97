"""Time, memory and files of commands as the number of images grows; exact CKA of many images.

    python benchmarks/scale.py images --folder DIR                      # 10 k, 100 k, 1 M images
    python benchmarks/scale.py exact --folder DIR                       # 16,384 and 32,768 images

Each command runs in a process of its own, imports included, with `--memory 512M` where it takes
that. The claims: seconds per image do not grow, nor does the peak of memory beyond the imports and
what was given. Stores (see scale_stores.py; a million images are 3 GB in 164,000 files) are made in
DIR where they are not there yet, and stay. `--record` keeps results in benchmarks/results/scale,
from which docs/scale.md is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, Usage, about_this_run, add_record_option, machine, usage_of

VITSEE = [sys.executable, "-m", "vitsee_cli", "-q"]
MEMORY = "512M"
TEST, FIRST_TEST_HASH = 2000, 10**9
# Options of each command beside its store; {n}: images, {test}: a store of other images.
COMMANDS: dict[str, list[str]] = {
    "info": [],
    "attn-dist": ["--memory", MEMORY],
    "normratio": ["--memory", MEMORY],
    "norms": ["--memory", MEMORY],
    "probe": ["--holdout", "0.2", "--memory", MEMORY],
    "knn": ["{test}", "--memory", MEMORY],
    "cka": [
        *(
            "--estimator",
            "minibatch",
            "--examples",
            "{n}",
            "--repeats",
            "1",
            "--no-cache",
        ),
        *("--sites", "blocks.1.out,blocks.3.out", "--memory", MEMORY),
    ],
}
OPEN = (
    "import sys; from vitsee_stores import open_store; s = open_store(sys.argv[1]); "
    "s.valid.sum()"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("images", "exact"))
    parser.add_argument(
        "--folder", type=Path, required=True, help="for stores: 4 GB, or 10 GB"
    )
    parser.add_argument("--images", type=int, nargs="+")
    parser.add_argument("--only", nargs="+", default=["open_store", *COMMANDS])
    add_record_option(parser)
    args = parser.parse_args()
    print(machine())
    if args.what == "images":
        rows = images(args.folder, args.images or [10_000, 100_000, 1_000_000], args.only)
    else:
        rows = exact(args.folder, args.images or [16_384, 32_768])
    if args.record:
        keep(f"{args.what}.json", rows)


def images(folder: Path, sizes: list[int], only: list[str]) -> list[dict[str, Any]]:
    """A row per size and command."""
    test = made(folder / "test.zarr", TEST, FIRST_TEST_HASH)
    rows: list[dict[str, Any]] = []
    for n in sizes:
        store = made(folder / f"{n}.zarr", n)
        n_files, size = count_files(store)
        print(f"{n} images: {n_files} files, {size / 1e9:.2f} GB")
        rows.append({"what": "store", "images": n, "files": n_files, "bytes": size})
        for name in only:
            command = [sys.executable, "-c", OPEN, str(store)]
            if name != "open_store":
                given = [word.format(n=n, test=test) for word in COMMANDS[name]]
                command = [*VITSEE, name, str(store), *given]
            if name == "info":
                usage_of(command)  # metadata from the disk once, as for the others
            rows.append(row(name, n, usage_of(command)))
    return rows


def exact(folder: Path, sizes: list[int]) -> list[dict[str, Any]]:
    """A row per size: exact CKA of two sites with two of another store, Gram matrices kept on disk
    (and removed), then once more from these."""
    rows = []
    for n in sizes:
        stores = [
            made(folder / f"{name}-{n}.zarr", n, seed=k) for k, name in enumerate("ab")
        ]
        cache = folder / f"grams-{n}"
        command = [
            *VITSEE,
            "cka",
            *map(str, stores),
            "--estimator",
            "exact",
            "--cache",
            str(cache),
        ]
        command += ["--sites", "blocks.1.out,blocks.3.out", "--memory", "1G"]
        rows.append(row("exact", n, usage_of(command)))
        rows[-1]["bytes"] = count_files(cache)[1]
        rows.append(row("cached", n, usage_of(command)))
        shutil.rmtree(cache)
    return rows


def made(path: Path, n: int, first_hash: int = 0, seed: int = 0) -> Path:
    """The store, of other images where the hash is another, of other numbers where the seed is;
    made in a process of its own: a new process counts the peak of the one that
    started it as its own."""
    if not path.exists():
        script = str(Path(__file__).with_name("scale_stores.py"))
        subprocess.run(
            [
                *(sys.executable, script, str(path), str(n)),
                *("--first", str(first_hash), "--seed", str(seed)),
            ],
            check=True,
        )
    return path


def count_files(place: Path) -> tuple[int, int]:
    """Files below a folder, and their bytes."""
    sizes = [
        os.path.getsize(os.path.join(here, name))
        for here, _, names in os.walk(place)
        for name in names
    ]
    return len(sizes), sum(sizes)


def row(what: str, n: int, used: Usage) -> dict[str, Any]:
    """Of a measurement; printed too."""
    print(
        f"{n:9,d} images  {what:10} {used.seconds:7.1f} s, processor {used.cpu:6.1f} s "
        f"({1e6 * used.cpu / n:6.1f} us per image), peak RSS {used.rss / 1e6:6.0f} MB",
        flush=True,
    )
    numbers = {
        "seconds": round(used.seconds, 2),
        "cpu": round(used.cpu, 2),
        "rss": used.rss,
    }
    return {"what": what, "images": n, **numbers}


def keep(name: str, rows: list[dict[str, Any]]) -> None:
    """Results that a page is printed from, see scale_page.py."""
    path = RESULTS / "scale" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about_this_run(), "rows": rows}, indent=1) + "\n")
    print(f"recorded: {name} (now: python benchmarks/scale_page.py)")


if __name__ == "__main__":
    main()
