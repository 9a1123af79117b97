"""The common frame of every analysis command around its computation."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
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
    """Context with the keyword `map` of an analysis, if a Dask cluster does the work.

    Args:
        dask: address of the scheduler or `local:N`; None without a cluster, for no keyword.
        progress: shows the number of workers meanwhile.
    """
    if dask is None:
        yield {}
        return
    from vitsee_core.runtime.dask_map import dask_map
    from vitsee_core.runtime.machine import plural

    with dask_map(dask) as over_workers:
        progress.suffix = lambda: plural(over_workers.n_workers(), "workers")
        yield {"map": over_workers}


def absolute(value: Any) -> Any:
    """Return a copy of an option's value in which all paths are absolute.

    Paths in containers and dataclasses are found, too. A worker of a cluster has another working
    directory.
    """
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, dict):
        return {key: absolute(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(absolute, value))
    if is_dataclass(value) and not isinstance(value, type):
        changes = {
            field.name: absolute(getattr(value, field.name)) for field in fields(value)
        }
        return replace(value, **changes)
    return value


def paths_in(value: Any) -> Iterator[Path]:
    """Yield every path, and every text, which may be one, in the values of options."""
    if isinstance(value, (str, Path)):
        yield Path(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from paths_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from paths_in(item)


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
    """Open the stores, compute `run(*stores, **parameters)`, and write the table to `outputs`.

    Outputs that exist are refused before any work.

    Args:
        run: the analysis.
        draw: `draw` of its declaration, for --png; None for a command without that option.
        stores: the stores of the command line.
        outputs: where the table, its sidecar and the figure go.
        allow_partial: whether stores may be unfinished.
        resumes: what is kept if the command is stopped, so that repeating it continues.
        dask: address of the cluster that does the work; None for this process.
        drawing: keywords of `plot`; the sidecar keeps them for `vitsee plot`.
        x: "step" or "epoch", if the stores are of one model over its training: the table gets
            that column, and comparisons are of layers of equal depth.
        parameters: everything that decides the result; recorded in the sidecar.

    Raises:
        VitseeError: an output exists, a store cannot be read, or the analysis refuses them.
    """
    from vitsee_core.pages.report.outputs import write_results
    from vitsee_core.tables.steps import with_steps

    # All that can be refused is refused before the work.
    _check_outputs(outputs, parameters)
    if resumes:
        click.get_current_context().meta[console.RESUMES] = resumes
    opened = options.open_stores(stores, allow_partial=allow_partial)
    _check_memory(opened, parameters.get("memory"))

    if x and parameters.get("pairs") == "all":
        # A chart along the steps has one value of a layer at each step.
        parameters["pairs"] = "same-depth"
    recorded = {**parameters, "allow_partial": allow_partial}
    if x:
        recorded["x"] = x
    make_sidecar = partial(_make_sidecar, run, opened, recorded, drawing)
    if outputs.if_changed and _is_done(outputs, make_sidecar(), parameters):
        return

    arguments = parameters if dask is None else absolute(parameters)
    if "force" in inspect.signature(run).parameters:
        # The analysis writes a file of its own, which it would refuse to replace.
        arguments = {**arguments, "force": outputs.force}
    progress = console.Reporter(click.get_current_context().info_name or "vitsee")
    key_of_kept_work = {**recorded, "dask": dask is not None}
    with (
        kept_beside(run, outputs, opened, key_of_kept_work) as keep_keyword,
        spread_over(dask, progress) as map_keyword,
    ):
        table = run(
            *opened, **arguments, **map_keyword, **keep_keyword, progress=progress
        )
    if x:
        table = with_steps(table, x)
    write_results(
        table,
        outputs,
        figure=partial(_draw_figure, run, draw, table, drawing),
        # Made again: stores and files may have changed during the work.
        sidecar=make_sidecar(),
        stdout=sys.stdout,
    )
    if "keep" in keep_keyword:  # the table is written: half of the work is not needed
        keep_keyword["keep"].remove()


def _check_outputs(outputs: Outputs, parameters: Mapping[str, Any]) -> None:
    """Refuse outputs that exist, that are inputs too, or that have nowhere to go.

    Raises:
        VitseeError: names the output.
    """
    from vitsee_core.pages.report.outputs import check_outputs

    images = str(parameters.get("data") or "")
    check_outputs(outputs, inputs=paths_in(parameters), images=images)
    if outputs.csv is None:
        console.require_stdout()


def _is_done(
    outputs: Outputs, sidecar: dict[str, Any], parameters: Mapping[str, Any]
) -> bool:
    """Return whether the outputs are up to date; if so, say it and set their times to now."""
    from vitsee_core.pages.report.outputs import is_up_to_date, touch

    if not is_up_to_date(outputs, sidecar, [*paths_in(parameters)]):
        return False
    touch(outputs)
    console.say(f"{outputs.csv} is up to date")
    return True


def _make_sidecar(
    run: Callable[..., Table],
    stores: Sequence[Store],
    recorded: Mapping[str, Any],
    drawing: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the sidecar of a table, with the state that stores and files have now.

    Args:
        run: the analysis.
        stores: the opened stores.
        recorded: everything that decides the result, by option.
        drawing: keywords of `plot`, for `vitsee plot`; None or empty for none.
    """
    from vitsee_core.tables.sidecars import describe_run

    sidecar = describe_run(
        stores,
        command=console.command_line(),
        parameters=recorded,
        guest=registry.guest_of(run.__module__),
    )
    if drawing:
        sidecar = {**sidecar, "figure": dict(drawing)}
    return sidecar


def _draw_figure(
    run: Callable[..., Table],
    draw: Callable[..., Figure] | None,
    table: Table,
    drawing: Mapping[str, Any] | None,
) -> Figure:
    """Return the figure of a table; called if --png asks for one, so that `draw` is not None."""
    assert draw is not None
    # The chart over a training has no options.
    plot_keywords = {} if table.step_unit else drawing or {}
    # An error of a guest's code is reported as the guest's.
    with registry.blamed(run.__module__):
        return draw(table, **plot_keywords)


@contextmanager
def kept_beside(
    run: Callable[..., Table],
    outputs: Outputs,
    stores: Sequence[Store],
    parameters: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Context with the keyword `keep` of an analysis, if the analysis has it.

    Then the sums of long work are kept in a folder beside the table, and a command that is
    stopped says so. A table on stdout has no such folder.

    Args:
        run: the analysis.
        outputs: where the table goes.
        stores: the opened stores.
        parameters: what decides the result: sums of other parameters are not read.
    """
    run_parameters = inspect.signature(run).parameters.values()
    takes_keep = any(
        parameter.name == "keep" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in run_parameters
    )
    if outputs.csv is None or not takes_keep:
        yield {}
        return
    from vitsee_core.runtime.kept_sums import FoldCheckpoints
    from vitsee_core.tables.sidecars import describe_work

    context = click.get_current_context()
    name = context.info_name or ""
    folder = outputs.csv.with_name(f"{outputs.csv.name}.partial")
    checkpoints = FoldCheckpoints(
        folder, lambda: describe_work(name, stores, parameters, leave_out=folder)
    )
    # --force begins anew; but a study gives it to all of its steps, which then go on.
    is_step_of_study = context.find_root() is not context.parent
    if outputs.force and not outputs.if_changed and not is_step_of_study:
        checkpoints.remove()
    try:
        yield {"keep": checkpoints}
    except KeyboardInterrupt:
        if checkpoints.status:
            line = f"{checkpoints.status} is kept; repeat the command to go on"
            context.meta[console.RESUMES] = line
        raise


def _check_memory(stores: Sequence[Store], memory: int | None) -> None:
    """Refuse a budget, in bytes, that is smaller than what reading one chunk of a store takes."""
    if memory is None:
        return
    for store in stores:
        largest_chunk = 0
        for spec in store.arrays.values():
            if spec.per in ("image", "slab"):
                largest_chunk = max(largest_chunk, spec.chunk_bytes)
        # A chunk as it is stored (float16), and its copy of twice that size (float32).
        needed = 3 * largest_chunk
        if memory < needed:
            raise VitseeError(
                f"--memory is {human_bytes(memory)}, but reading a chunk of "
                f"{store.label} takes {human_bytes(needed)}; give that or more"
            )
