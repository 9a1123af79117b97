"""What every analysis command does around its computation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options
from vitsee_cli.values import StorePath
from vitsee_stores.errors import VitseeError
from vitsee_stores.url import lies_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_core.outputs import Outputs
    from vitsee_core.results import Table


@contextmanager
def spread_over(dask: str | None, progress: console.Reporter) -> Iterator[dict[str, Any]]:
    """The keyword `map` of an analysis, where a cluster does the work; `progress` then says by how
    many workers.

    Raises:
        VitseeError: there is no such cluster.
    """
    if dask is None:
        yield {}
        return
    from vitsee_core.dask_map import dask_map
    from vitsee_core.machine import counted

    with dask_map(dask) as over_workers:
        progress.beside = lambda: counted(over_workers.n_workers(), "workers")
        yield {"map": over_workers}


def absolute(value: Any) -> Any:
    """`value` with the paths in it absolute: a worker has a working folder of its own."""
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, dict):
        return {key: absolute(own) for key, own in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(absolute, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: absolute(getattr(value, f.name)) for f in fields(value)})
    return value


def run_analysis(
    run: Callable[..., Table],
    plot: Callable[..., Figure] | None,
    stores: tuple[StorePath, ...],
    outputs: Outputs,
    *,
    allow_partial: bool = False,
    resumes: str = "",
    dask: str | None = None,
    drawing: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> None:
    """Open the stores, compute, write: `run(*stores, **parameters)` to `outputs`.

    Args:
        run: the analysis.
        plot: its figure, drawn where --png asks for one; None without that option.
        stores: from `options.stores_argument`.
        outputs: from `options.output_options`; refused before the work if they exist.
        allow_partial: from `options.allow_partial_option`.
        resumes: what is kept where the command is stopped, so that repeating it goes on.
        dask: from `options.dask_option`, the cluster that does the work.
        drawing: keywords of `plot`; the sidecar keeps them for `vitsee plot`.
        parameters: all that decides the result; they go into the sidecar.

    Raises:
        VitseeError: an output exists, a store cannot be read, or the analysis lacks its input.
    """
    from vitsee_core.outputs import check_outputs, describe_run, write_results

    check_outputs(outputs)
    if outputs.csv is None:
        console.require_stdout()
    for store in stores:
        if any(lies_in(path, store.place) for path in outputs.paths()):
            raise VitseeError(f"results do not go into a store ({store.place}); name another place")
    if resumes:
        click.get_current_context().meta[console.RESUMES] = resumes
    opened = options.open_stores(stores, allow_partial=allow_partial)
    progress = console.Reporter(click.get_current_context().info_name or "vitsee")
    given = parameters if dask is None else absolute(parameters)
    with spread_over(dask, progress) as own:
        table = run(*opened, **given, **own, progress=progress)
    sidecar = describe_run(
        opened,
        command=console.command_line(),
        parameters={**parameters, "allow_partial": allow_partial},
    )
    if drawing:
        sidecar["figure"] = dict(drawing)

    def figure() -> Figure:
        assert plot is not None
        return plot(table, **(drawing or {}))

    write_results(table, outputs, figure=figure, sidecar=sidecar, stdout=sys.stdout)
