"""The common frame of every analysis command around its computation."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options
from vitsee_cli.values import StorePath
from vitsee_core.runtime import registry
from vitsee_core.runtime.machine import human_bytes
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_core.pages.report.outputs import Outputs
    from vitsee_core.tables.results import Table
    from vitsee_stores import Store


@contextmanager
def spread_over(dask: str | None, progress: console.Reporter) -> Iterator[dict[str, Any]]:
    """The keyword `map` of an analysis if a cluster does the work, whose size `progress` then
    shows."""
    if dask is None:
        yield {}
        return
    from vitsee_core.runtime.dask_map import dask_map
    from vitsee_core.runtime.machine import plural

    with dask_map(dask) as over_workers:
        progress.beside = lambda: plural(over_workers.n_workers(), "workers")
        yield {"map": over_workers}


def absolute(value: Any) -> Any:
    """`value` with absolute paths: a worker has its own working directory."""
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, dict):
        return {key: absolute(own) for key, own in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(absolute, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: absolute(getattr(value, f.name)) for f in fields(value)}
        )
    return value


def paths_in(value: Any) -> Iterator[Path]:
    """Every path, and every text that may be one, in the values of options."""
    if isinstance(value, (str, Path)):
        yield Path(value)
    elif isinstance(value, (dict, list, tuple)):
        for own in value.values() if isinstance(value, dict) else value:
            yield from paths_in(own)


def run_analysis(
    run: Callable[..., Table],
    draw: Callable[..., Figure] | None,
    stores: tuple[StorePath, ...],
    outputs: Outputs,
    *,
    allow_partial: bool = False,
    resumes: str = "",
    dask: str | None = None,
    drawing: Mapping[str, Any] | None = None,
    x: str | None = None,
    **parameters: Any,
) -> None:
    """Open the stores, compute `run(*stores, **parameters)`, and write it to `outputs`, which are
    refused before the work if they exist.

    Args:
        run: the analysis.
        draw: `draw` of its declaration, for --png; None without that option.
        stores: of the command line.
        outputs: where the result goes.
        allow_partial: stores may be unfinished.
        resumes: what is kept if the command is stopped, so that repeating it continues.
        dask: the cluster that does the work.
        drawing: keywords of its `plot`; the sidecar keeps them for `vitsee plot`.
        x: "step" or "epoch" of stores over a training: the table gets its column, and of
            comparisons the pairs of equal depth.
        parameters: everything that decides the result; recorded in the sidecar.
    """
    from vitsee_core.pages.report.outputs import (
        check_outputs,
        is_up_to_date,
        touch,
        write_results,
    )
    from vitsee_core.tables.sidecars import describe_run
    from vitsee_core.tables.steps import with_steps

    check_outputs(
        outputs, inputs=paths_in(parameters), images=str(parameters.get("data") or "")
    )
    if outputs.csv is None:
        console.require_stdout()
    if resumes:
        click.get_current_context().meta[console.RESUMES] = resumes
    opened = options.open_stores(stores, allow_partial=allow_partial)
    _check_memory(opened, parameters.get("memory"))
    progress = console.Reporter(click.get_current_context().info_name or "vitsee")
    given = parameters if dask is None else absolute(parameters)
    if (
        x and parameters.get("pairs") == "all"
    ):  # a chart has one value of a layer at a step
        parameters["pairs"] = "same-depth"
    described = {**parameters, "allow_partial": allow_partial, **({"x": x} if x else {})}

    def described_now() -> dict[str, Any]:
        guest = registry.guest_of(run.__module__)
        command = console.command_line()
        sidecar = describe_run(opened, command=command, parameters=described, guest=guest)
        if drawing:
            return {**sidecar, "figure": dict(drawing)}
        return sidecar

    read = [*paths_in(parameters)]
    if outputs.if_changed and is_up_to_date(outputs, described_now(), read):
        touch(outputs)
        console.say(f"{outputs.csv} is up to date")
        return
    takes = inspect.signature(run).parameters
    if "force" in takes:  # the analysis writes a file of its own
        given = {**given, "force": outputs.force}
    with (
        kept_beside(
            run, outputs, opened, {**described, "dask": dask is not None}
        ) as keep,
        spread_over(dask, progress) as own,
    ):
        table = run(*opened, **given, **own, **keep, progress=progress)
    if x:
        table = with_steps(table, x)

    def figure() -> Figure:
        assert draw is not None
        options = {} if table.step_unit else drawing or {}
        with registry.blamed(run.__module__):
            return draw(table, **options)

    write_results(
        table, outputs, figure=figure, sidecar=described_now(), stdout=sys.stdout
    )
    if kept := keep.get("keep"):
        kept.remove()


@contextmanager
def kept_beside(
    run: Callable[..., Table],
    outputs: Outputs,
    stores: Sequence[Store],
    parameters: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """The keyword `keep` of an analysis that has it, if its table has a file: beside it half of
    long work is kept, and a command that is stopped reports so."""
    if outputs.csv is None or not _keeps(run):
        yield {}
        return
    from vitsee_core.runtime.kept_sums import FoldCheckpoints
    from vitsee_core.tables.sidecars import describe_work

    context = click.get_current_context()
    name = context.info_name or ""
    folder = outputs.csv.with_name(f"{outputs.csv.name}.partial")
    kept = FoldCheckpoints(
        folder, lambda: describe_work(name, stores, parameters, leave_out=folder)
    )
    begins_anew = outputs.force and not outputs.if_changed
    if (
        begins_anew and context.find_root() is context.parent
    ):  # a study always forces its steps
        kept.remove()
    try:
        yield {"keep": kept}
    except KeyboardInterrupt:
        if kept.status:
            line = f"{kept.status} is kept; repeat the command to go on"
            context.meta[console.RESUMES] = line
        raise


def _keeps(run: Callable[..., Table]) -> bool:
    parameters = inspect.signature(run).parameters.values()
    return any(p.name == "keep" or p.kind is p.VAR_KEYWORD for p in parameters)


def _check_memory(stores: Sequence[Store], memory: int | None) -> None:
    """Refuse less memory than reading one chunk of a store takes, in float16 and float32."""
    for store in stores:
        specs = (spec for spec in store.arrays.values() if spec.per in ("image", "slab"))
        need = 3 * max((spec.chunk_bytes for spec in specs), default=0)
        if memory is not None and memory < need:
            raise VitseeError(
                f"--memory is {human_bytes(memory)}, but reading a chunk of {store.label} takes "
                f"{human_bytes(need)}; give that or more"
            )
