"""The figure of a result, drawn again from its table and sidecar, and changed to taste."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
from vitsee_core.tables.results import ResultFile, Table, read_result
from vitsee_core.tables.same_labels import disambiguate_labels
from vitsee_core.tables.table_sites import rows_of_sites
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

WRITTEN = "expected a table that a vitsee command wrote with -o"


@dataclass(frozen=True)
class Result:
    """A result whose analysis is known. file: the table and its sidecar; analysis: what made
    it, and draws it."""

    file: ResultFile
    analysis: Analysis

    @property
    def command(self) -> str:
        return self.file.command

    def figure(
        self,
        table: Table | None = None,
        size: tuple[float, float] | None = None,
        medium: str | Medium | None = None,
        over_training: bool = True,
    ) -> Figure:
        """The figure that the command draws, of the whole table or of some of its rows; of a table
        over a training that along its steps, unless `over_training` is off. Raises VitseeError: the
        table was changed, and is nothing that the command draws any more."""
        sidecar = self.file.sidecar
        known = inspect.signature(self.analysis.plot).parameters
        more = {name: x for name, x in sidecar.get("figure", {}).items() if name in known}
        if "results" in sidecar:
            metrics = sidecar.get("parameters", {}).get("metrics")
            more |= {"files": self._inputs()}
            more |= {"metrics": tuple(metrics) if isinstance(metrics, list) else ()}
        drawn = self.file.table if table is None else table
        try:
            with drawn_for(medium, size), registry.blamed(self.analysis.module):
                if drawn.step_unit and not over_training:
                    return self.analysis.plot(drawn, **more)
                figure = self.analysis.draw(drawn, **({} if drawn.step_unit else more))
        except VitseeError:
            raise
        except Exception as error:
            # A table as its command wrote it is always drawn: if not, this is our bug.
            if self.file.as_written and drawn is self.file.table and len(drawn):
                raise
            changed = " and was changed since" if self.file.changed else ""
            rows = "these rows of it make" if drawn is not self.file.table else "it makes"
            raise VitseeError(
                f"{self.file.path} was written by vitsee {self.command}{changed}: {rows} "
                f"no figure of that command ({type(error).__name__}: {error})"
            ) from error
        return figure

    def _inputs(self) -> list[ResultFile]:
        """The results that this one was made of, where they are now: as recorded, or beside it."""
        paths = []
        labels = []
        for entry in self.file.sidecar["results"]:
            if not isinstance(entry, dict):
                continue
            recorded = Path(str(entry.get("path", "")))
            places = (recorded, self.file.path.with_name(recorded.name))
            place = next((path for path in places if path.is_file()), None)
            if place is None:
                raise VitseeError(
                    f"{recorded} is gone, whose curves this figure shows; expected it "
                    f"there, or beside {self.file.path}"
                )
            paths.append(place)
            labels.append(str(entry.get("label", "")))
        assert self.analysis.read_inputs is not None, (
            "only an analysis of tables has results"
        )
        return self.analysis.read_inputs(paths, labels)


def open_result(path: str | Path) -> Result:
    """The table in a file and the analysis that made it.

    Raises:
        VitseeError: no table, no sidecar beside it, or not of an analysis that draws figures.
        OSError: it cannot be opened.
    """
    file = read_result(path)
    beside = f"{file.path.name}.json"
    if not file.sidecar and is_stream(file.path):
        return _of_stream(file)
    if not file.sidecar:
        raise VitseeError(
            f"{file.path} has no sidecar {beside} beside it, which says whose figure it "
            f"is; {WRITTEN}, together with its sidecar"
        )
    name = file.command.replace("-", "_")
    package = file.sidecar.get("package", {})
    guest = registry.guests().get(name)
    if package and (guest is None or guest.package != package.get("name")):
        raise VitseeError(
            f"{file.path} is of vitsee {file.command}, an analysis of the package "
            f"{package.get('name')} {package.get('version')}, which is not installed here"
        )
    if "notes" not in file.sidecar or name not in registry.names():
        made_by = f"of vitsee {file.command}" if file.command else "of another program"
        raise VitseeError(f"{file.path} is {made_by}, which draws no figure; {WRITTEN}")
    there = file.table.frame.columns
    lacks = [name for name in file.sidecar.get("columns", ()) if name not in there]
    if lacks:
        raise VitseeError(
            f"{file.path} lost columns since vitsee {file.command} wrote it: "
            f"{', '.join(lacks)}"
        )
    if file.changed:
        log.warning("%s was changed since vitsee %s wrote it", file.path, file.command)
    return Result(file, registry.load(name))


def _may_have_made(analysis: Analysis, table: Table) -> bool:
    if (
        analysis.read_inputs is not None
    ):  # its figure also shows tables that a sidecar names
        return False
    try:
        analysis.check_table(table)
    except DeclarationError:
        return False
    return True


def _of_stream(file: ResultFile) -> Result:
    """A table that was piped on, without its sidecar, as the result of the one analysis that has
    its columns and metrics. Raises VitseeError: none has, or several."""
    analyses = {
        name: own for name, own in registry.loaded() if _may_have_made(own, file.table)
    }
    # Some have the columns of others, and more. A table lacks columns that would be empty.
    columns = {*file.table.frame.columns}
    lacks = {
        name: min(
            len({*declared} - columns) for declared in (own.columns, *own.other_columns)
        )
        for name, own in analyses.items()
    }
    fewest = min(lacks.values(), default=0)
    analyses = {name: own for name, own in analyses.items() if lacks[name] == fewest}
    if len(analyses) != 1:
        whose = " and ".join(name.replace("_", "-") for name in analyses) or "no command"
        raise VitseeError(
            f"the table from {file.path} has columns and metrics of {whose}; {WRITTEN}, "
            "and its file in place of a pipe"
        )
    ((name, analysis),) = analyses.items()
    return Result(replace(file, command=name.replace("_", "-")), analysis)


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
    """The figure of a result file, as its command draws it, and then as `look` wants it.

    Args:
        paths: of the table; its sidecar lies beside it. Of several: one figure of all their rows.
        sites: only the rows about these, see `rows_of_sites`.
        metrics: only the rows of these.
        size: width and height in inches; by default what the medium and the content decide.
        medium: one of `panels.MEDIA`, by default a page.
        look: theme, colours, range, title, axes; by default the command's.
        x: a chart along this attribute or column in place of the command's figure, see
            `with_attribute` and `draw_attribute_chart`; of a table over a training its unit, see
            `draw_over_training`, which is the default, or "rel_depth" for the command's figure.
        by: attributes or columns whose values make the curves of such a chart.
        group_by: an attribute or column whose values are the groups of stores.
        attributes: a table of the user's own attributes.

    Raises:
        VitseeError: see `open_result`, `rows_of_sites`, `with_attribute` and `Look.put_on`; no rows
            are left, or results of different commands.
        OSError: it cannot be opened.
    """
    given = [paths] if isinstance(paths, str | Path) else paths
    result = _joined([open_result(path) for path in given])
    table = rows_of_sites(result.file.table, sites) if sites else result.file.table
    if metrics:
        table = _of_metrics(table, metrics)
    own = None if attributes is None else Table.read(attributes)
    if group_by:
        if "results" in result.file.sidecar:
            raise VitseeError(
                f"{result.file.path} was made of other results: label their stores "
                "GROUP/NAME"
            )
        table = label_groups(table, group_by, [result.file.sidecar], own)
    wanted = look or Look()
    with drawn_as(wanted.theme, wanted.put_on):
        if not x:
            return result.figure(table, size, medium)
        unit = table.step_unit
        if unit and x == "rel_depth":
            return result.figure(table, size, medium, over_training=False)
        if x == unit:
            with drawn_for(medium, size):
                return draw_over_training(table, by)
        for name in (x, *by):
            table = with_attribute(table, name, [result.file.sidecar], own)
        with drawn_for(medium, size):
            return draw_attribute_chart(table, x, by)


def _of_metrics(table: Table, metrics: Sequence[str]) -> Table:
    """The rows of these metrics. Raises VitseeError: one that the table does not have."""
    if "metric" not in table.frame.columns:
        raise VitseeError("this table has no column metric: leave --metric out")
    known = table.frame["metric"].cast(pl.String).unique(maintain_order=True).to_list()
    if lack := [name for name in metrics if name not in known]:
        raise VitseeError(f"no metric {lack[0]} in this table; it has {', '.join(known)}")
    return table.filter(pl.col("metric").is_in(list(metrics)))


def _joined(results: Sequence[Result]) -> Result:
    """Results of one command as one, with the stores of all in its sidecar."""
    first = results[0].file
    if len(results) == 1:
        return results[0]
    for file in (result.file for result in results[1:]):
        own = (file.command, file.table.written.columns)
        if own != (first.command, first.table.written.columns):
            raise VitseeError(
                f"{file.path} is of vitsee {file.command} ({file.describe_columns()}), "
                f"{first.path} of vitsee {first.command} ({first.describe_columns()}); "
                "expected results of one command with the same columns"
            )
    files = disambiguate_labels([result.file for result in results])
    table = Table.concat([file.table for file in files], notes=first.table.notes)
    stores = [entry for file in files for entry in file.sidecar.get("stores", ())]
    joined = replace(first, table=table, sidecar={**first.sidecar, "stores": stores})
    return replace(results[0], file=joined)
