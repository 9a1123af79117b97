"""The frame of an analysis: keywords and `Execution`, and progress that reaches its end."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.attention_maps import layout, random_attention, write
from tests.stores import write_labelled, write_residuals
from vitsee_cli import console
from vitsee_core.analyses import (
    attn_dist,
    attn_map,
    cka,
    cluster,
    cosine_map,
    effect,
    head_types,
    knn,
    normratio,
    norms,
    pca,
    probe,
    spatial,
    spectrum,
)
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.progress import Silent, counting
from vitsee_core.tables.results import Table
from vitsee_stores import Store

N = 12


class Recorder(Silent):
    """What was counted, phase by phase: [unit, total, done, whether it was stopped]."""

    def __init__(self) -> None:
        self.phases: list[list[Any]] = []

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        self.phases.append([unit, total, done, False])

    def advance(self, count: int, size_bytes: int = 0) -> None:
        self.phases[-1][2] += count

    def stop(self) -> None:
        self.phases[-1][3] = True


def heads(folder: Path) -> tuple[Store, ...]:
    return (write(folder / "heads.zarr", [random_attention(layout(), N, (2, 2))]),)


def labelled(folder: Path, n_stores: int = 1) -> tuple[Store, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        write_labelled(
            *(folder / f"{i}.zarr", {"embed": rng.normal(size=(N, 3, 4))}, [0, 1, 2] * 4),
            hash_offset=100 * i,
        )
        for i in range(n_stores)
    )


def residuals(folder: Path) -> tuple[Store, ...]:
    products = {f"blocks.{i}.mlp": np.ones((N, 7, 3)) for i in range(2)}
    return (write_residuals(folder / "residuals.zarr", products),)


WORK: dict[
    str, tuple[Callable[..., Table], Callable[[Path], tuple[Store, ...]], dict[str, Any]]
]
WORK = {
    "attn-dist": (attn_dist.run, heads, {}),
    "attn-map": (attn_map.run, heads, {"kind": "mean-cls"}),
    "attn-map rollout": (attn_map.run, heads, {"kind": "rollout"}),
    "attn-map entropy": (attn_map.run, heads, {"kind": "entropy"}),
    "cka": (cka.run, labelled, {"sites": "embed", "no_cache": True}),
    "cluster": (cluster.run, labelled, {"sites": "embed", "n_seeds": 2}),
    "cosine-map": (
        cosine_map.run,
        lambda f: labelled(f)[:1],
        {"sites": "embed", "to": ("1",)},
    ),
    "cosine-map by offset": (
        *(cosine_map.run, lambda f: labelled(f)[:1], {"sites": "embed", "offsets": True}),
    ),
    "effect": (
        effect.run,
        lambda f: 2 * labelled(f),
        {"sites": "embed", "no_cache": True},
    ),
    "head-types": (head_types.run, heads, {}),
    "knn": (knn.run, lambda f: labelled(f, 2), {"sites": "embed", "ks": (3,)}),
    "norms": (norms.run, lambda f: labelled(f)[:1], {"sites": "embed"}),
    "normratio": (normratio.run, residuals, {}),
    "pca": (pca.run, lambda f: labelled(f)[:1], {"sites": "embed"}),
    "pca of a foreground": (
        *(
            pca.run,
            lambda f: labelled(f)[:1],
            {"sites": "embed", "foreground": "positive"},
        ),
    ),
    "spatial": (spatial.run, lambda f: labelled(f)[:1], {"sites": "embed"}),
    "spectrum": (spectrum.run, lambda f: labelled(f)[:1], {"sites": "embed"}),
    "spectrum of tokens": (
        *(
            spectrum.run,
            lambda f: labelled(f)[:1],
            {"sites": "embed", "tokens": "patches"},
        ),
    ),
    "probe": (probe.run, lambda f: labelled(f, 2), {"sites": "embed", "l2": (1.0,)}),
}


@pytest.mark.parametrize("name", WORK)
def test_progress_reaches_its_end(name: str, tmp_path: Path) -> None:
    run, make, parameters = WORK[name]
    progress = Recorder()
    run(*make(tmp_path), **parameters, progress=progress, device="cpu")
    assert progress.phases
    for _, total, done, stopped in progress.phases:
        assert done == total > 0
        assert stopped


def test_progress_stops_after_an_error() -> None:
    progress = Recorder()
    with pytest.raises(ZeroDivisionError), counting(progress, 3, "rows"):
        progress.advance(1)
        raise ZeroDivisionError
    assert progress.phases == [["rows", 3, 1, True]]


def test_keywords_are_fields_of_the_execution(tmp_path: Path) -> None:
    (store,) = heads(tmp_path)
    whole = attn_map.run(store, kind="entropy")
    few = attn_map.run(store, kind="entropy", images=4, jobs=2)
    assert few.notes["images"]["rows"] == 4
    assert not np.array_equal(few["value"], whole["value"])
    same = attn_map.run(store, kind="entropy", execution=Execution(images=4))
    both = attn_map.run(
        store, kind="entropy", execution=Execution(images=9, seed=3), images=4
    )
    for other in (same, both):
        np.testing.assert_array_equal(other["value"], few["value"])
    assert both.notes["seed"] == 3
    with pytest.raises(TypeError, match="image_count"):
        attn_map.run(store, kind="entropy", image_count=4)


def test_help_shows_the_fields() -> None:
    parameters = inspect.signature(attn_dist.run).parameters
    assert parameters["metrics"].default == ()
    for field in fields(Execution):
        assert parameters[field.name].default == field.default
    assert list(parameters)[-1] == "execution"


def test_short_work_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """And longer work says at its end what it was, in its unit."""
    console.setup(0)
    for after in (30.0, 0.0):
        reporter = console.Reporter("knn", show_after=after)
        with counting(reporter, 4, "rows"):
            reporter.advance(4)
        shown = capsys.readouterr().err
        assert ("knn: 4/4 rows" in shown) == (after == 0), shown


def test_a_bar_appears_without_an_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first piece takes long, the bar is there before it is done."""
    from rich.console import Console

    console.setup(0)
    monkeypatch.setattr(
        console, "stderr", lambda: Console(stderr=True, force_terminal=True)
    )
    monkeypatch.setenv("TERM", "xterm")
    reporter = console.Reporter("knn", show_after=0.01)
    with counting(reporter, 4, "rows"):
        bar = reporter._display
        assert isinstance(bar, console._Bar)
        deadline = time.monotonic() + 30
        while not (bar.live and bar.live.live.is_started) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert bar.live and bar.live.live.is_started
