"""What trials share: forked processes, the undisturbed store, the table of how trials ended."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.extractions import array_bytes, plant_images
from tests.faults.trials import N, ends_well, extraction
from tests.processes import Server
from tests.random_stores import tokens_site, write
from vitsee_stores.layout import StorePlan, TokenLayout

Ends = Callable[[str], None]


@dataclass
class Whole:
    """A store that one process made: its place, its bytes, the seconds it took."""

    path: Path
    bytes: dict[str, bytes]
    seconds: float


@dataclass
class Trial:
    """What one trial works with. rng: of its seed, 0 for a trial without one."""

    run: Server
    images: Path
    whole: Whole
    folder: Path
    rng: random.Random
    ended: Ends

    @property
    def path(self) -> Path:
        """Where its store is, or will be."""
        return self.folder / "s.zarr"

    def extraction(self, *more: object) -> list[object]:
        """The words of an extraction into that store."""
        return extraction(self.images, self.path, *more)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), N)


@pytest.fixture(scope="session")
def whole(run: Server, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """What an extraction gives that nothing disturbs."""
    path, started = tmp_path_factory.mktemp("whole") / "whole.zarr", time.monotonic()
    ends_well(run.run(*extraction(images, path)))
    return Whole(path, array_bytes(path), time.monotonic() - started)


@pytest.fixture
def trial(
    request: pytest.FixtureRequest,
    run: Server,
    images: Path,
    whole: Whole,
    tmp_path: Path,
) -> Trial:
    seed = getattr(request.node, "callspec", None) and request.node.callspec.params.get(
        "seed", 0
    )
    ended = request.getfixturevalue("ended")
    return Trial(run, images, whole, tmp_path, random.Random(seed or 0), ended)


@pytest.fixture
def ended(record_property: Callable[[str, object], None]) -> Ends:
    """Note how a trial ended, for the table."""
    return lambda how: record_property("ended", how)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reports, which may come from another process, say which fault a test is about."""
    for item in items:
        if (mark := item.get_closest_marker("fault")) is not None:
            item.user_properties.append(("fault", mark.args[0]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which faults were tried how often, and how that ended."""
    found: dict[str, Counter[str]] = {}
    for kind in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(kind, []):
            noted = list(getattr(report, "user_properties", []))
            for name in [value for key, value in noted if key == "fault"]:
                counts = found.setdefault(name, Counter())
                ends = [str(value) for key, value in noted if key == "ended"]
                counts.update(ends if ends and kind == "passed" else (kind,))
    if found:
        terminalreporter.section("faults")
        width = max(map(len, found))
        terminalreporter.write_line(f"{'fault':{width}}  trials  how they ended")
        for name, counts in sorted(found.items()):
            how = ", ".join(f"{end} {n}" for end, n in sorted(counts.items()))
            terminalreporter.write_line(
                f"{name:{width}}  {sum(counts.values()):6}  {how}"
            )


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose Gram matrices take a while."""
    layout = TokenLayout(("cls",), (2, 2), stride_px=(16.0, 16.0))
    sites = tuple(
        tokens_site(f"blocks.{i}.out", layout, dim=64, depth=i) for i in range(6)
    )
    path = tmp_path_factory.mktemp("many") / "many.zarr"
    write(path, StorePlan(1500, 250, "none", sites))
    return path


@pytest.fixture(scope="session")
def clean(run: Server, many: Path) -> tuple[str, float]:
    """What cka prints of it, and the seconds that takes."""
    started = time.monotonic()
    done = ends_well(run.run("cka", many, "--no-cache"))
    return done.stdout, time.monotonic() - started
