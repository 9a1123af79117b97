"""The figure of a result, drawn again from its table and sidecar, and changed to taste."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsee_core.declaration import Analysis
from vitsee_core.figures.attribute_charts import draw_attribute_chart
from vitsee_core.figures.looks import Look
from vitsee_core.figures.panels import Medium, drawn_for
from vitsee_core.figures.plotting import drawn_as
from vitsee_core.figures.training_charts import draw_over_training
from vitsee_core.runtime import registry
from vitsee_core.runtime.parameters import DeclarationError
from vitsee_core.tables.attributes import label_groups, with_attribute
from vitsee_core.tables.files import is_stream
from vitsee_core.tables.formats import EXPECTED_TABLE
from vitsee_core.tables.results import ResultFile, Table, read_result
from vitsee_core.tables.same_labels import disambiguate_labels
from vitsee_core.tables.table_sites import rows_of_sites
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """A table with its sidecar, and the analysis that made it and draws it."""

    file: ResultFile
    analysis: Analysis

    @property
    def command(self) -> str:
        """The name of the command that made it."""
        return self.file.command

    def figure(
        self,
        table: Table | None = None,
        size: tuple[float, float] | None = None,
        medium: str | Medium | None = None,
        over_training: bool = True,
    ) -> Figure:
        """Return the figure that the command draws.

        Args:
            table: rows to draw in place of the whole table.
            size: width and height in inches.
            medium: for which it is drawn; by default a page.
            over_training: draw a table over a training along its steps, rather than as the command
                draws its other tables.

        Raises:
            VitseeError: the table was changed such that the command cannot draw it.
        """
        options = self._figure_options()
        if table is None:
            table = self.file.table
        try:
            with drawn_for(medium, size), registry.blamed(self.analysis.module):
                if not table.step_unit:
                    return self.analysis.draw(table, **options)
                if over_training:
                    return self.analysis.draw(table)
                return self.analysis.plot(table, **options)
        except VitseeError:
            raise
        except Exception as error:
            # A table as its command wrote it is always drawn: if not, this is our bug.
            is_whole_table = table is self.file.table
            if self.file.as_written and is_whole_table and len(table):
                raise
            changed = " and was changed since" if self.file.changed else ""
            rows = "it makes" if is_whole_table else "these rows of it make"
            raise VitseeError(
                f"{self.file.path} was written by vitsee {self.command}{changed}: {rows} "
                f"no figure of that command ({type(error).__name__}: {error})"
            ) from error

    def _figure_options(self) -> dict[str, Any]:
        """Return the options of the analysis' `plot` that the sidecar records."""
        sidecar = self.file.sidecar
        known_options = inspect.signature(self.analysis.plot).parameters
        options = {}
        for name, value in sidecar.get("figure", {}).items():
            if name in known_options:
                options[name] = value
        if "results" in sidecar:
            metrics = sidecar.get("parameters", {}).get("metrics")
            options["files"] = self._read_inputs()
            options["metrics"] = tuple(metrics) if isinstance(metrics, list) else ()
        return options

    def _read_inputs(self) -> list[ResultFile]:
        """Return the results that this one was made of, from their recorded paths or beside it."""
        paths = []
        labels = []
        for entry in self.file.sidecar["results"]:
            if not isinstance(entry, dict):
                continue
            recorded = Path(str(entry.get("path", "")))
            path = recorded
            if not path.is_file():  # moved together with this result
                path = self.file.path.with_name(recorded.name)
            if not path.is_file():
                raise VitseeError(
                    f"{recorded} is gone, whose curves this figure shows; expected it "
                    f"there, or beside {self.file.path}"
                )
            paths.append(path)
            labels.append(str(entry.get("label", "")))
        assert self.analysis.read_inputs is not None, (
            "only an analysis of tables has results"
        )
        return self.analysis.read_inputs(paths, labels)


def open_result(path: str | Path) -> Result:
    """Return the table in a file with the analysis that made it.

    Raises:
        VitseeError: no table, no sidecar beside it, or not of an analysis that draws figures.
        OSError: it cannot be opened.
    """
    file = read_result(path)
    if not file.sidecar and is_stream(file.path):
        return _recognise_stream(file)
    if not file.sidecar:
        raise VitseeError(
            f"{file.path} has no sidecar {file.path.name}.json beside it, which says "
            f"whose figure it is; {EXPECTED_TABLE}, together with its sidecar"
        )
    name = file.command.replace("-", "_")
    # A guest of that name may be another package's.
    package = file.sidecar.get("package", {})
    guest = registry.guests().get(name)
    if package and (guest is None or guest.package != package.get("name")):
        raise VitseeError(
            f"{file.path} is of vitsee {file.command}, an analysis of the package "
            f"{package.get('name')} {package.get('version')}, which is not installed here"
        )
    if "notes" not in file.sidecar or name not in registry.names():
        made_by = f"of vitsee {file.command}" if file.command else "of another program"
        raise VitseeError(
            f"{file.path} is {made_by}, which draws no figure; {EXPECTED_TABLE}"
        )
    # A table may be edited, but not lose columns that its figure reads.
    columns = file.table.frame.columns
    lost = [name for name in file.sidecar.get("columns", ()) if name not in columns]
    if lost:
        raise VitseeError(
            f"{file.path} lost columns since vitsee {file.command} wrote it: "
            f"{', '.join(lost)}"
        )
    if file.changed:
        log.warning("%s was changed since vitsee %s wrote it", file.path, file.command)
    return Result(file, registry.load(name))


def _may_have_made(analysis: Analysis, table: Table) -> bool:
    """Return whether an analysis declares all columns and metrics of a table."""
    # The figure of such an analysis also shows tables which only a sidecar names.
    if analysis.read_inputs is not None:
        return False
    try:
        analysis.check_table(table)
    except DeclarationError:
        return False
    return True


def _recognise_stream(file: ResultFile) -> Result:
    """Return a table that was piped, without its sidecar, as the result of an analysis.

    It is the only analysis that declares the table's columns and metrics.

    Raises:
        VitseeError: there is no such analysis, or several.
    """
    columns = {*file.table.frame.columns}
    candidates: dict[str, Analysis] = {}
    n_lacking: dict[str, int] = {}
    for name, analysis in registry.loaded():
        if _may_have_made(analysis, file.table):
            candidates[name] = analysis
            # A table lacks columns that would be empty. Of several kinds the closest counts.
            n_lacking[name] = len({*analysis.columns} - columns)
            for other_columns in analysis.other_columns:
                n = len({*other_columns} - columns)
                n_lacking[name] = min(n_lacking[name], n)
    # Some analyses have the columns of another one and more: the table lacks those.
    fewest = min(n_lacking.values(), default=0)
    names = [name for name in candidates if n_lacking[name] == fewest]
    if len(names) != 1:
        commands = " and ".join(name.replace("_", "-") for name in names) or "no command"
        raise VitseeError(
            f"the table from {file.path} has columns and metrics of {commands}; "
            f"{EXPECTED_TABLE}, and its file in place of a pipe"
        )
    command = names[0].replace("_", "-")
    return Result(replace(file, command=command), candidates[names[0]])


def redraw(
    paths: str | Path | Sequence[str | Path],
    *,
    sites: Sequence[str] = (),
    metrics: Sequence[str] = (),
    size: tuple[float, float] | None = None,
    medium: str | None = None,
    look: Look | None = None,
    x: str = "",
    by: Sequence[str] = (),
    group_by: str = "",
    attributes: str | Path | None = None,
) -> Figure:
    """Return the figure of a result file, as its command draws it, changed by `look`.

    Args:
        paths: of tables whose sidecars lie beside them; several make one figure of all their rows.
        sites: selectors; only rows about these sites are drawn.
        metrics: only rows of these are drawn.
        size: width and height in inches; by default the medium and the content decide.
        medium: one of `panels.MEDIA`, by default a page.
        look: theme, colours, range, title, axes; by default the command's.
        x: draw a chart along this attribute or column in place of the command's figure. For a table
            over a training its unit is the default, and "rel_depth" gives the command's figure.
        by: attributes or columns whose values make the curves of a chart along `x`.
        group_by: an attribute or column whose values are the groups of stores.
        attributes: a table of the user's own attributes.

    Raises:
        VitseeError: a file is not a result, the results are of different commands, no rows are
            left, an attribute is not known, or `look` does not fit the figure.
        OSError: a file cannot be opened.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    result = _join_results([open_result(path) for path in paths])
    table = rows_of_sites(result.file.table, sites) if sites else result.file.table
    if metrics:
        table = _rows_of_metrics(table, metrics)
    attributes_table = None if attributes is None else Table.read(attributes)
    if group_by:
        if "results" in result.file.sidecar:
            raise VitseeError(
                f"{result.file.path} was made of other results: label their stores "
                "GROUP/NAME"
            )
        table = label_groups(table, group_by, [result.file.sidecar], attributes_table)
    look = look or Look()
    with drawn_as(look.theme, look.put_on):
        if not x:
            return result.figure(table, size, medium)
        # Along the attribute or column x.
        unit = table.step_unit
        if unit and x == "rel_depth":
            return result.figure(table, size, medium, over_training=False)
        if x == unit:
            with drawn_for(medium, size):
                return draw_over_training(table, by)
        for name in (x, *by):
            table = with_attribute(table, name, [result.file.sidecar], attributes_table)
        with drawn_for(medium, size):
            return draw_attribute_chart(table, x, by)


def _rows_of_metrics(table: Table, metrics: Sequence[str]) -> Table:
    """Return the rows of these metrics.

    Raises:
        VitseeError: the table does not have one of them.
    """
    if "metric" not in table.frame.columns:
        raise VitseeError("this table has no column metric: leave --metric out")
    column = table.frame["metric"].cast(pl.String)
    table_metrics = column.unique(maintain_order=True).to_list()
    for metric in metrics:
        if metric not in table_metrics:
            raise VitseeError(
                f"no metric {metric} in this table; it has {', '.join(table_metrics)}"
            )
    return table.filter(pl.col("metric").is_in(list(metrics)))


def _join_results(results: Sequence[Result]) -> Result:
    """Return results of one command as one, with the stores of all in its sidecar."""
    if len(results) == 1:
        return results[0]
    first = results[0].file
    for result in results[1:]:
        file = result.file
        same_columns = file.table.written.columns == first.table.written.columns
        if file.command != first.command or not same_columns:
            raise VitseeError(
                f"{file.path} is of vitsee {file.command} ({file.describe_columns()}), "
                f"{first.path} of vitsee {first.command} ({first.describe_columns()}); "
                "expected results of one command with the same columns"
            )
    # Stores of one label may be several models.
    files = disambiguate_labels([result.file for result in results])
    table = Table.concat([file.table for file in files], notes=first.table.notes)
    stores = [entry for file in files for entry in file.sidecar.get("stores", ())]
    joined = replace(first, table=table, sidecar={**first.sidecar, "stores": stores})
    return replace(results[0], file=joined)
