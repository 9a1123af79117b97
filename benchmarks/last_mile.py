"""The way from numbers to a table, a figure and a page: what each step of a study takes on stores
that are there, and the same of whole commands, here and in another checkout in turn.

    vitsee demo --real -o real-out
    python benchmarks/last_mile.py steps --folder real-out
    python benchmarks/last_mile.py commands --folder real-out [--pair CHECKOUT] [--only pca]

The folder is a finished study's and stays as it is: everything runs in copies of it, whose files
are links, beside it. `steps` starts a process for each analysis: its `run` as the study's command
calls it, the table written in the format of the study's file and read back, beside them polars with
the same rows and types, the figure as PNG, the peak of memory; then the pages as whole commands.
`commands` times whole commands, and with --pair those of another checkout between them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from common import Result, add_record_option, interleaved, machine, record, usage_of

OURS, OTHER = "ours", "other"
ENDINGS = (".parquet", ".csv")  # of tables
TIMES = ("analysis", "write", "read", "figure")
SLOW = 1.0  # seconds from which a step has lines of its own in the record
LONE = ("pca", "norms", "cosine-map", "explore")  # steps that are timed as commands
STUDY, HELP = "the study, stores there", "vitsee --help"
FIRST, AGAIN = "report, the first", "report, again with nothing changed"
CKA, EXTRACT = "cka of a small store", "extract, nothing to do"
# The words before what `python last_mile.py` runs in a process of its own.
STEP, TABLE = "--step", "--table"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=" ".join((__doc__ or "").split("\n\n")[0].split())
    )
    parser.add_argument("what", choices=("steps", "commands"))
    parser.add_argument("--folder", type=Path, required=True, help="a finished study")
    parser.add_argument(
        "--pair", type=Path, help="another checkout, in turn with this one"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--study-rounds",
        type=int,
        default=1,
        help="of the whole study, which takes minutes",
    )
    parser.add_argument("--only", action="append", default=[], help="steps, or commands")
    add_record_option(parser)
    args = parser.parse_args()
    print(machine(), flush=True)
    study = args.folder.resolve()
    with tempfile.TemporaryDirectory(prefix="last-mile-", dir=study.parent) as work:
        places = {OURS: checkout()} | ({OTHER: args.pair.resolve()} if args.pair else {})
        sides = {
            name: Side(root, study, Path(work, name)) for name, root in places.items()
        }
        title = "The last mile of a study"
        if args.what == "steps":
            rows = [*steps(sides[OURS], args.only)]
            name = "last-mile-steps"
        else:
            rows = [*commands(sides, args.rounds, args.study_rounds, args.only)]
            name = "last-mile"
            title += ": whole commands" + (
                ", against the commit before" if args.pair else ""
            )
    if args.record:
        record(name, title, rows)


def checkout() -> Path:
    """The folder of the packages that this process would import."""
    found = importlib.util.find_spec("vitsee_core")
    if found is None or found.origin is None:
        sys.exit("no vitsee_core here: install the project, or set PYTHONPATH")
    return Path(found.origin).parents[1]


class Side:
    """A checkout, and its own copy of the study."""

    def __init__(self, root: Path, study: Path, folder: Path) -> None:
        self.root, self.study, self.folder = root, study, folder
        self.n_copies, self.rss = 0, dict[str, int]()
        packages = os.pathsep.join(str(root / x) for x in ("", "cli", "stores"))
        self.python = ["env", f"PYTHONPATH={packages}", sys.executable]
        self.whole: Path | None = None  # a copy with results of this checkout
        folder.mkdir()

    def copy(self, *, of: Path | None = None, results: bool = True) -> Path:
        """A new copy of the study, or of another copy; without pages, and without what a program
        hid beside its results."""
        of = of or self.study
        self.n_copies += 1
        new = self.folder / str(self.n_copies)

        def left_out(folder: str, names: list[str]) -> set[str]:
            if Path(folder) != of:
                return (
                    set()
                    if ".zarr" in folder
                    else {n for n in names if n.startswith(".")}
                )
            kept = {"stores", "sets", "weights", "photographs", "study.json"}
            kept |= {
                n for n in names if results and not n.endswith(".html") and n[0] != "."
            }
            return {*names} - kept

        shutil.copytree(of, new, ignore=left_out, copy_function=_linked)
        (new / "results").mkdir(exist_ok=True)
        record_ = new / "study.json"
        text = record_.read_text()
        record_.unlink()
        record_.write_text(moved(text, root_of(json.loads(text)), new))
        return new

    def finished(self) -> Path:
        """A copy whose results are this checkout's."""
        if self.whole is None:
            self.study_again()
        assert self.whole is not None
        return self.whole

    def study_again(self) -> float:
        """Seconds of the whole study in a copy without results, which is kept."""
        place = self.copy(results=False)
        seconds = self.time(STUDY, recorded(place)["command"][1:])
        if self.whole is not None:
            shutil.rmtree(self.whole)
        self.whole = place
        return seconds

    def step(self, what: str, name: str, of: Path | None = None) -> float:
        """Seconds of a step's command in a copy."""
        place = self.copy(of=of)
        seconds = self.time(what, words_of_step(place, name))
        shutil.rmtree(place)
        return seconds

    def time(self, what: str, words: Sequence[str]) -> float:
        """Seconds of a command."""
        usage = usage_of([*self.python, "-m", "vitsee_cli", *words])
        self.rss[what] = max(usage.rss, self.rss.get(what, 0))
        return usage.seconds

    def ask(self, *words: str) -> dict[str, Any]:
        """The answer of this script, run in a process with this checkout's packages."""
        command = [*self.python, __file__, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(words)}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def _linked(old: str, new: str) -> None:
    """A link, as every file is replaced and none written to; caches are copied."""
    (shutil.copy2 if ".grams/" in old else os.link)(old, new)


# --- a study's record -------------------------------------------------------------------------


def root_of(study: Mapping[str, Any]) -> str:
    """The folder as its record names it: `vitsee report FOLDER ...` is the last step."""
    return shlex.split(study["steps"]["report"]["command"])[2]


def moved(text: str, old: str, new: Path) -> str:
    """A text in which the study's folder is another one."""
    return re.sub(
        rf"(?<![\w./-]){re.escape(old)}(?=[/\"'\s]|$)", lambda _: str(new), text
    )


def recorded(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "study.json").read_text())
        root_of(found)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{folder} has no record of a finished study: {error!r}")
    return found


def words_of_step(folder: Path, name: str) -> list[str]:
    """The command of a step, in this copy."""
    return shlex.split(recorded(folder)["steps"][name]["command"])[1:]


def done_steps(folder: Path) -> list[str]:
    return [
        name for name, own in recorded(folder)["steps"].items() if own["status"] == "done"
    ]


# --- steps --------------------------------------------------------------------------------------


def steps(side: Side, only: Sequence[str]) -> Iterator[Result]:
    """A line for each step that is an analysis, as a table; then the pages."""
    folder = side.copy()
    heads = (
        "rows",
        "MB",
        "analysis",
        "write",
        "read",
        "figure",
        "step",
        "polars",
        "ratio",
        "peak MB",
    )
    print(f"{'step':30}" + "".join(f"{head:>10}" for head in heads))
    sums, rest = (
        dict.fromkeys((*TIMES, "polars"), 0.0),
        dict.fromkeys((*TIMES, "polars"), 0.0),
    )
    size = n_rest = 0
    for name in done_steps(folder):
        words = words_of_step(folder, name)
        if (only and name not in only) or not _is_analysis(words[0]):
            continue
        table = next(
            (p for e in ENDINGS if (p := folder / "results" / f"{name}{e}").exists()),
            None,
        )
        if table is None:
            continue
        own = side.ask(STEP, json.dumps(words), str(table), str(side.folder))
        size += own["size"]
        for key in sums:
            sums[key] += own[key] or 0.0
        show(name, own)
        if total(own) < SLOW:
            n_rest += 1
            for key in rest:
                rest[key] += own[key] or 0.0
        else:
            yield from lines_of(f"{name}, {own['rows']:,} rows", own)
    if n_rest:
        yield from lines_of(f"the other {n_rest} steps", rest)
    show("all", {**sums, "rows": None, "size": size, "rss": None})
    yield Result("tables, without their sidecars", size / 1e6, None, None, "MB")
    for name in ("explore", "report"):
        if name in done_steps(folder) and (not only or name in only):
            seconds = side.step(name, name)
            print(
                f"{name}, a page: {seconds:.2f} s, peak {side.rss[name] / 1e6:.0f} MB",
                flush=True,
            )
            yield Result(f"{name}: the page", seconds, None, None, "s")


def total(own: Mapping[str, Any]) -> float:
    """Seconds of a step: nothing reads the table back."""
    return sum(own[key] or 0.0 for key in ("analysis", "write", "figure"))


def show(name: str, own: Mapping[str, Any]) -> None:
    cells = [
        own["rows"],
        own["size"] / 1e6,
        *(own[key] for key in TIMES),
        total(own),
        own["polars"],
    ]
    ratio = (own["write"] + own["read"]) / own["polars"] if own["polars"] else None
    cells += [ratio, own["rss"] and own["rss"] / 1e6]
    texts = [
        "" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:.3g}" for x in cells
    ]
    print(f"{name:30}" + "".join(f"{text:>10}" for text in texts), flush=True)


def lines_of(what: str, own: Mapping[str, Any]) -> Iterator[Result]:
    """The lines of a step in the record."""
    yield Result(f"{what}: analysis", own["analysis"], None, None, "s")
    spent, least = own["write"] + own["read"], own["polars"]
    words = f"{what}: table written and read back, against polars alone"
    yield Result(words, spent, least, least / spent, "s")
    if own["figure"]:
        yield Result(f"{what}: figure", own["figure"], None, None, "s")


def _is_analysis(command: str) -> bool:
    return (
        importlib.util.find_spec(f"vitsee_core.analyses.{command.replace('-', '_')}")
        is not None
    )


class _Made(BaseException):
    """Ends a command when its table is there; no handler of errors takes it for one."""


def step(words: Sequence[str], like: Path, work: Path) -> dict[str, Any]:
    """In a process of its own: seconds of each part of a step.

    Args:
        words: the command.
        like: its table's file, whose format is the one to write.
        work: a folder to write in.
    """
    from vitsee_cli.main import main as group
    from vitsee_stores.errors import VitseeError

    module: Any = importlib.import_module(
        f"vitsee_core.analyses.{words[0].replace('-', '_')}"
    )
    run, found = module.run, dict[str, Any]()

    @wraps(run)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock(found, "analysis"):
            found["table"] = run(*args, **kwargs)
        raise _Made

    module.run = timed
    with suppress(_Made):
        group.main(["--quiet", *words], prog_name="vitsee", standalone_mode=False)
    made = found.pop("table")
    found |= {"rows": len(made), "figure": None}
    new = work / f"table{like.suffix}"
    with clock(found, "write"):
        made.write(new, force=True)
    try:
        with clock(found, "figure"):
            module.plot(made).savefig(work / "figure.png")
    except VitseeError as error:  # it has nothing to draw
        print(f"{words[0]}: {error}", file=sys.stderr)
    found["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    del made
    return (
        found | read_back(new) | {"size": new.stat().st_size, "polars": limit(new, work)}
    )


def table(path: Path, work: Path) -> dict[str, Any]:
    """In a process of its own: seconds of writing and reading a table, and its rows."""
    from vitsee_core.tables.results import Table

    found = read_back(path)
    own = Table.read(path)
    with clock(found, "write"):
        own.write(work / f"table{path.suffix}", force=True)
    return found | {
        "rows": len(own),
        "columns": len(json.loads(_sidecar(path))["columns"]),
    }


def read_back(path: Path) -> dict[str, Any]:
    from vitsee_core.tables.results import Table

    found: dict[str, Any] = {}
    with clock(found, "read"):
        Table.read(path)
    return found


def _sidecar(path: Path) -> str:
    return path.with_name(f"{path.name}.json").read_text()


def limit(path: Path, work: Path) -> float:
    """Seconds that polars takes to write and read these rows, types known, in this format."""
    import polars

    kinds = json.loads(_sidecar(path))["columns"]
    types = {"number": polars.Float64, "integer": polars.Int64}
    schema = {name: types.get(kind, polars.String) for name, kind in kinds.items()}
    again, seconds = work / f"polars{path.suffix}", []
    if path.suffix == ".parquet":
        frame = polars.read_parquet(path)
    else:
        frame = polars.read_csv(path, schema_overrides=schema)
    for _ in range(3):
        began = time.perf_counter()
        if path.suffix == ".parquet":
            frame.write_parquet(again)
            polars.read_parquet(again)
        else:
            frame.write_csv(again)
            polars.read_csv(again, schema_overrides=schema)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


@contextmanager
def clock(into: dict[str, Any], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    into[name] = time.perf_counter() - began


# --- whole commands -----------------------------------------------------------------------------


def commands(
    sides: Mapping[str, Side], rounds: int, study_rounds: int, only: Sequence[str]
) -> Iterator[Result]:
    """A line for each command, and for the peak of its memory."""
    first = sides[OURS]
    there = done_steps(first.study)

    def asked(what: str) -> bool:
        return not only or any(word in what for word in only)

    def line(what: str, of: Callable[[Side], float]) -> Iterator[Result]:
        if not asked(what):
            return
        runs = {name: lambda side=side: of(side) for name, side in sides.items()}
        n = study_rounds if what == STUDY else rounds
        seconds = interleaved(runs, n, warmup=0)
        if len(sides) > 1:
            yield said(Result.of(what, seconds, OURS, OTHER))
        else:
            yield said(Result(what, statistics.median(seconds[OURS]), None, None, "s"))
        peaks = [side.rss[what] / 1e6 for side in sides.values() if what in side.rss]
        if peaks:
            yield said(beside(f"{what}: peak memory", peaks))

    yield from line(STUDY, Side.study_again)
    for name in (name for name in LONE if name in there):
        yield from line(name, lambda side, name=name: side.step(name, name))  # type: ignore[misc]
    yield from line(FIRST, lambda side: side.step(FIRST, "report", side.finished()))
    yield from line(AGAIN, report_again)
    yield from results(sides, asked)
    yield from line(HELP, lambda side: side.time(HELP, ["--help"]))
    small = min(
        (first.study / "stores").glob("*.zarr"), key=lambda path: sum(sizes(path))
    )
    words = [
        "cka",
        str(small),
        "--no-cache",
        "-o",
        str(first.folder / "cka.csv"),
        "--force",
    ]
    yield from line(CKA, lambda side: side.time(CKA, words))
    kept = next(name for name in there if name.startswith("extract"))
    yield from line(EXTRACT, lambda side: extract_again(side, kept))


def extract_again(side: Side, step: str) -> float:
    """Seconds of an extraction's command where the same command made the store."""
    place = side.folder / "again.zarr"
    words = words_of_step(side.study, step)
    words[words.index("-o") + 1] = str(place)
    if not place.exists():
        usage_of([*side.python, "-m", "vitsee_cli", *words])
    return side.time(EXTRACT, words)


def report_again(side: Side) -> float:
    """Seconds of the report where another one was just made."""
    place = side.copy(of=side.finished())
    words = words_of_step(place, "report")
    usage_of([*side.python, "-m", "vitsee_cli", *words])
    seconds = side.time(AGAIN, words)
    shutil.rmtree(place)
    return seconds


def results(sides: Mapping[str, Side], asked: Callable[[str], bool]) -> Iterator[Result]:
    """The sizes of the results, and the largest table written and read in the format it has."""
    if asked("results on disk"):
        found = [side.finished() / "results" for side in sides.values()]
        yield said(
            beside("results on disk, with figures", [sum(sizes(x)) / 1e6 for x in found])
        )
        tables = [sum(sizes(x, *ENDINGS)) / 1e6 for x in found]
        yield said(beside("results on disk, tables alone", tables))
    if asked("the largest table"):
        timed = []
        for side in sides.values():
            below = (side.finished() / "results").iterdir()
            named = {
                p for p in below if p.suffix in ENDINGS and "replicates" not in p.name
            }
            rows = {p: json.loads(_sidecar(p))["rows"] for p in named}
            own = max(rows, key=lambda p: rows[p])
            timed.append((own, side.ask(TABLE, str(own), str(side.folder))))
        own, about = timed[0]
        head = f"the largest table, {own.stem}: {about['rows']:,} rows, {about['columns']} columns"
        for part in ("write", "read"):
            yield said(
                beside(f"{head}: {part}", [found[part] for _, found in timed], "s")
            )


def beside(what: str, numbers: Sequence[float], unit: str = "MB") -> Result:
    """Ours, and the other's if there is one."""
    ours, other = [*numbers, None][:2]
    assert ours is not None
    return Result(what, ours, other, None if other is None else other / ours, unit)


def sizes(folder: Path, *endings: str) -> Iterator[int]:
    """Bytes of the files below a folder, or of those with these endings."""
    for path in folder.rglob("*"):
        if path.is_file() and (not endings or path.suffix in endings):
            yield path.stat().st_size


def said(row: Result) -> Result:
    """The same, printed."""
    numbers = [row.ours, row.other, row.ratio]
    cells = ["" if x is None else f"{x:,.4g}" for x in numbers]
    print(
        f"{row.what:60}" + "".join(f"{x:>10}" for x in cells) + f" {row.unit}", flush=True
    )
    return row


if __name__ == "__main__":
    if sys.argv[1:2] == [STEP]:
        print(
            json.dumps(
                step(json.loads(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
            )
        )
    elif sys.argv[1:2] == [TABLE]:
        print(json.dumps(table(Path(sys.argv[2]), Path(sys.argv[3]))))
    else:
        main()
