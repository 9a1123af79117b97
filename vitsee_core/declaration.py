"""The declaration of an analysis, which is checked as soon as it is made.

    ANALYSIS = Analysis(
        module=__name__,
        question=FLOW,
        help="Measure the mean norm of tokens. ...",
        needs=("sites",),
        reading="The mean length of a layer's tokens against depth; ...",
        source="Darcet et al. 2024, Fig. 3",
        columns=COLUMNS,
        metrics=("token_norm",),
        run=run,
        plot=plot,
    )

It is the last statement of the analysis' module. The command line, `help(vitsee.x)`, studies and
reports are made from it and from the signatures of `run` and `plot`. A mistake in it is a
`DeclarationError`, which names the module, the field, and what was expected; a table that `run`
returned and that is not as declared is one, too, and so is a figure without anything in it.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from vitsee_core.runtime.options import (
    EXECUTION_OPTIONS,
    QUESTIONS,
    Fields,
    Gather,
    Offers,
    Option,
    PythonOnly,
)
from vitsee_core.runtime.parameters import (
    OPTION_TYPES,
    DeclarationError,
    DeclaredParameter,
    options_of,
    parameters_of,
)
from vitsee_core.tables.columns import (
    ADDED_COLUMNS,
    BASELINE,
    PAIR,
    REPLICATES,
    SITE,
    VALUES,
    has_known_type,
)
from vitsee_core.tables.headlines import Answer
from vitsee_core.tables.results import Table
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What an analysis may need of a model.
NEEDS = ("sites", "grid", "attention", "heads", "residual", "images")
COLUMN_TYPES = (str, int, float)
# Columns of some tables, beside those of sites, pairs and values.
_OTHER_VITSEE_COLUMNS = ("head", "class", "row", "col", "token")


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The declaration of an analysis.

    Attributes:
        module: `__name__` of the module that declares it. The first line of its docstring is the
            title and the question: `Token norm: how long are the tokens?`
        question: the heading of `vitsee --help`, one of `QUESTIONS`; "" for a command that stands
            below other commands.
        help: the text of `vitsee x --help`, whose first sentence `vitsee --help` shows; "" of an
            analysis whose command is a file of its own, `cli/vitsee_cli/commands/x.py`, which
            declares the options.
        needs: what a model must offer, some of `NEEDS`; None of an analysis of tables.
        reading: how to read the figure, in sentences.
        readings: kind -> how to read the figure, where the notes of tables have several kinds.
        source: the papers, with years and figures.
        columns: the columns of the table, in their order.
        other_columns: the columns of other tables that it makes with some options.
        column_types: column -> `str`, `int` or `float`, for columns that no other table has.
        meanings: column -> what it means, where its name does not say it; the help has it.
        metrics: the names in the column `metric`; `*` stands for any letters (`pck@*`).
        run: `run(*stores, ..., execution) -> Table`, decorated with `@analysis`.
        plot: `plot(table) -> Figure`, decorated with `@styled`.
        headline: the answers of a table, a line per store; None if there are none.
        at_a_glance: the table of few rows whose figure stands for a table; None for all rows.
        glance_metric: the metric whose curves stand for a table; "" if its figure does, None for
            its first metric.
        may_lack_values: whether all values of a table may be NaN, of which `run` warns.
        of_arrays: what `vitsee.x(array, ...)` computes of features that are in no store.
        read_inputs: reads the results that a table was made of, of an analysis of tables.

    Raises:
        DeclarationError: a field is not as it has to be.
    """

    module: str
    reading: str
    source: str
    columns: Sequence[str]
    metrics: Sequence[str]
    run: Callable[..., Table]
    plot: Callable[..., Figure]
    question: str = ""
    help: str = ""
    needs: Sequence[str] | None = None
    readings: Mapping[str, str] = field(default_factory=dict)
    other_columns: Sequence[Sequence[str]] = ()
    column_types: Mapping[str, type] = field(default_factory=dict)
    meanings: Mapping[str, str] = field(default_factory=dict)
    headline: Callable[[Table], list[Answer]] | None = None
    at_a_glance: Callable[[Table], Table] | None = None
    glance_metric: str | None = None
    may_lack_values: bool = False
    of_arrays: Callable[..., Table] | None = None
    read_inputs: Callable[..., list[Any]] | None = None

    def __post_init__(self) -> None:
        for mistake in _mistakes(self):
            raise DeclarationError(
                f"{self.module}: {mistake.field_name} {mistake.problem}; "
                f"expected {mistake.expected}"
            )

    @cached_property
    def docstring(self) -> str:
        """The docstring of the module, without its indentation."""
        return inspect.getdoc(sys.modules[self.module]) or ""

    @cached_property
    def all_columns(self) -> tuple[str, ...]:
        """The columns of all its tables, each once."""
        columns = list(self.columns)
        for more in self.other_columns:
            columns += [column for column in more if column not in columns]
        return tuple(columns)

    def stores(self) -> list[DeclaredParameter]:
        """The parameters of `run` that take stores."""
        parameters = parameters_of(self.run).values()
        return [parameter for parameter in parameters if parameter.takes_stores]

    def draw(self, table: Table, **options: Any) -> Figure:
        """Return the figure of a table; of a table over a training, the chart along its steps.

        Raises:
            DeclarationError: rows have values, and the figure shows nothing, or asks for a metric
                that no row has.
        """
        if table.step_unit:
            # Imported here: `vitsee x --help` draws nothing.
            from vitsee_core.figures.training_charts import draw_over_training

            return draw_over_training(table, **options)
        try:
            figure = self.plot(table, **options)
        except DeclarationError as error:
            raise DeclarationError(f"{self.module}: plot: {error}") from error
        if not any(axes.has_data() for axes in figure.axes) and _has_values(table.frame):
            metrics = ", ".join(_metrics_in(table.frame))
            # An empty figure looks like a result: `plot` most likely knows other metrics.
            raise DeclarationError(
                f"{self.module}: plot drew nothing of a table with metric {metrics}; expected a "
                f"figure of each of its metrics ({', '.join(self.metrics)})"
            )
        return figure

    def check_table(self, table: Any) -> None:
        """Check what `run` returned.

        Raises:
            DeclarationError: it is not a table, has columns or metrics that are not declared,
                columns of other types, or no value.
        """
        if not isinstance(table, Table):
            raise DeclarationError(
                f"{self.module}: run returned a {type(table).__name__}; expected a Table"
            )
        frame = table.written
        declared = {*self.all_columns, *ADDED_COLUMNS}
        undeclared = [name for name in frame.columns if name not in declared]
        if undeclared:
            raise DeclarationError(
                f"{self.module}: run returned the columns {', '.join(undeclared)}, which columns "
                f"do not name; expected some of {', '.join(self.all_columns)}"
            )
        for name, kind in self.column_types.items():
            if name in frame.columns and not _column_has_type(frame.schema[name], kind):
                raise DeclarationError(
                    f"{self.module}: run returned {name} as {frame.schema[name]}; expected "
                    f"{kind.__name__}, as column_types says"
                )
        for metric in _metrics_in(frame):
            if not any(fnmatchcase(metric, pattern) for pattern in self.metrics):
                raise DeclarationError(
                    f"{self.module}: run returned rows of the metric {metric!r}; expected some of "
                    f"metrics, {', '.join(self.metrics)}"
                )
        if len(frame) and not _has_values(frame) and not self.may_lack_values:
            raise DeclarationError(
                f"{self.module}: run returned no value: all {len(frame)} rows are NaN; expected a "
                "number in one of them (may_lack_values, if it warns why there is none)"
            )


def _metrics_in(frame: pl.DataFrame) -> list[str]:
    """Return the names in the column `metric`, in the order of the rows."""
    if "metric" not in frame.columns:
        return []
    return [
        str(metric) for metric in frame["metric"].unique(maintain_order=True).drop_nulls()
    ]


def _has_values(frame: pl.DataFrame) -> bool:
    return "value" in frame.columns and frame["value"].count() > 0


def _column_has_type(kind: pl.DataType, expected: type) -> bool:
    """Return whether a polars type fits one of `COLUMN_TYPES`; an empty column fits all."""
    if kind == pl.Null:
        return True
    if expected is str:
        return kind in (pl.String, pl.Categorical)
    if expected is int:
        return kind.is_integer()
    return kind.is_numeric()


# ---------------------------------------------------------------------------- what is checked


class Mistake(NamedTuple):
    """A mistake in a declaration, as its message says it."""

    field_name: str
    problem: str  # what the field is or has, a verb first: `is ''`
    expected: str  # what would be right


def _mistakes(analysis: Analysis) -> Iterable[Mistake]:
    """Yield the mistakes of a declaration, in the order of its fields.

    Later checks rely on earlier ones; only the first mistake is ever asked for.
    """
    yield from _mistakes_of_texts(analysis)
    yield from _mistakes_of_columns(analysis)
    yield from _mistakes_of_functions(analysis)


def _mistakes_of_texts(analysis: Analysis) -> Iterable[Mistake]:
    """Yield mistakes of the fields that are texts, and of the module's docstring."""
    for name in ("module", "question", "help", "reading", "source"):
        text = getattr(analysis, name)
        if not isinstance(text, str):
            yield Mistake(name, f"is {text!r}", "a text")
    if analysis.module not in sys.modules:
        yield Mistake("module", f"is {analysis.module!r}", "__name__")
    if not analysis.docstring:
        yield Mistake(
            "the docstring", "is empty", "`Title: question?` and what is computed"
        )
    if analysis.question not in ("", *QUESTIONS):
        yield Mistake(
            "question", f"is {analysis.question!r}", f"one of {', '.join(QUESTIONS)}"
        )
    if not analysis.reading.strip():
        yield Mistake("reading", "is empty", "how to read the figure")
    if not analysis.source.strip():
        yield Mistake("source", "is empty", "the papers")
    if analysis.needs is not None:
        yield from _unknown_words("needs", analysis.needs, NEEDS)


def _mistakes_of_columns(analysis: Analysis) -> Iterable[Mistake]:
    """Yield mistakes of the fields about the columns and metrics of the table."""
    for columns in (analysis.columns, *analysis.other_columns):
        name = "columns" if columns is analysis.columns else "other_columns"
        if not _is_sequence_of_texts(columns) or not {"metric", "value"} <= {*columns}:
            yield Mistake(
                name,
                f"is {columns!r}",
                "a tuple of names with metric and value among them",
            )
            return
        duplicates = [column for column in columns if list(columns).count(column) > 1]
        if duplicates:
            yield Mistake(name, f"has {duplicates[0]} twice", "every column once")
    for column, kind in analysis.column_types.items():
        if kind not in COLUMN_TYPES:
            yield Mistake(
                "column_types", f"has {column} as {kind!r}", "str, int or float"
            )
    # Columns of no other table: their type has to be declared, unless it is a slip of the pen.
    vitsee_columns = (*SITE, *PAIR, *VALUES, BASELINE, *_OTHER_VITSEE_COLUMNS)
    for column in analysis.all_columns:
        if not has_known_type(column) and column not in analysis.column_types:
            yield Mistake(
                "columns",
                f"has {column!r}, which is not a column of vitsee's tables",
                f"{_spelling_hint(column, vitsee_columns)}its type in column_types, as "
                f"column_types={{{column!r}: float}}",
            )
    yield from _unknown_words("column_types", analysis.column_types, analysis.all_columns)
    yield from _unknown_words("meanings", analysis.meanings, analysis.all_columns)
    if REPLICATES in analysis.all_columns:
        yield Mistake(
            "columns",
            f"has {REPLICATES!r}",
            "no such column: rows have that key without it",
        )
    if not _is_sequence_of_texts(analysis.metrics) or not analysis.metrics:
        yield Mistake(
            "metrics", f"is {analysis.metrics!r}", "the names in the column metric"
        )
    elif analysis.glance_metric:
        yield from _unknown_words(
            "glance_metric", [analysis.glance_metric], analysis.metrics
        )


def _mistakes_of_functions(analysis: Analysis) -> Iterable[Mistake]:
    """Yield mistakes of the fields that are functions, and of the signatures of run and plot."""
    for name in ("run", "plot"):
        if not callable(getattr(analysis, name)):
            yield Mistake(name, f"is {getattr(analysis, name)!r}", "a function")
            return
    for name in ("headline", "at_a_glance", "of_arrays", "read_inputs"):
        function = getattr(analysis, name)
        if function is not None and not callable(function):
            yield Mistake(name, f"is {function!r}", "a function, or None")
    if analysis.needs is None:  # an analysis of tables: no command gives it stores
        return
    parameters = parameters_of(analysis.run)
    if not hasattr(analysis.run, "__wrapped__"):
        yield Mistake("run", "has no decorator", "@analysis above it")
    if not any(parameter.takes_stores for parameter in parameters.values()):
        yield Mistake("run", "has no parameter of the type Store", "*stores: Store")
    if not analysis.help:  # its command has a file of its own, which declares the options
        return
    if "execution" not in parameters:
        yield Mistake(
            "run",
            "has no parameter execution",
            "execution: Annotated[Execution, Offers(...)]",
        )
    run_options = options_of(analysis.run)
    for parameter in parameters.values():
        yield from _mistakes_of_parameter("run", parameter, run_options)
    plot_parameters = [*parameters_of(analysis.plot).values()]
    if not plot_parameters:
        yield Mistake("plot", "takes nothing", "plot(table)")
    plot_options = options_of(analysis.plot)
    for parameter in plot_parameters[1:]:  # the first one is the table
        yield from _mistakes_of_parameter("plot", parameter, plot_options)


def _mistakes_of_parameter(
    function: str, parameter: DeclaredParameter, options: Mapping[str, DeclaredParameter]
) -> Iterable[Mistake]:
    """Yield the mistakes of a parameter.

    Args:
        function: `run` or `plot`, for the message.
        parameter: the parameter, or a field of a dataclass of options.
        options: name -> parameter of the other options, which `only_with` may name.
    """
    location = f"{function}, {parameter.name}"
    metadata = parameter.metadata
    if parameter.name == "execution":
        if not isinstance(metadata, Offers):
            yield Mistake(
                location, "has no Offers", 'Annotated[Execution, Offers("images seed")]'
            )
        else:
            yield from _unknown_words(
                f"{location}, Offers", metadata.fields.split(), EXECUTION_OPTIONS
            )
    elif isinstance(metadata, (Gather, Fields)):
        kind = metadata.kind if isinstance(metadata, Gather) else parameter.annotation
        for name, field_parameter in parameters_of(kind).items():
            yield from _mistakes_of_parameter(
                location, field_parameter, {**options, name: field_parameter}
            )
    elif parameter.takes_stores or isinstance(metadata, PythonOnly):
        return
    elif not isinstance(metadata, Option):
        # Without this the option would be missing on the command line, and nobody would see why.
        yield Mistake(
            location,
            f"is {parameter.text} without an Option",
            f"{parameter.name}: Annotated[{parameter.text}, Option(...)], or a shared one like "
            "SITES",
        )
    else:
        yield from _mistakes_of_option(location, parameter, metadata, options)


def _mistakes_of_option(
    location: str,
    parameter: DeclaredParameter,
    option: Option,
    options: Mapping[str, DeclaredParameter],
) -> Iterable[Mistake]:
    """Yield the mistakes of a parameter that has an `Option`."""
    for kind in parameter.types:
        if kind not in OPTION_TYPES and option.parse is None:
            yield Mistake(
                location,
                f"is {parameter.text}",
                "int, float, bool, str, Path, or a Sequence of these",
            )
            return
    if option.only_with:
        other_option = option.only_with[:1]
        yield from _unknown_words(f"{location}, only_with", other_option, options)
    defaults = parameter.default if parameter.is_sequence else (parameter.default,)
    if option.choices and isinstance(defaults, tuple):
        words = [default for default in defaults if isinstance(default, str)]
        yield from _unknown_words(f"{location}, its default", words, option.choices)


def _unknown_words(
    field_name: str, words: Any, known: Collection[str]
) -> Iterable[Mistake]:
    """Yield a mistake about the first word that is not known, or about words of another type."""
    if isinstance(words, Mapping):
        words = tuple(words)
    if not _is_sequence_of_texts(words):
        yield Mistake(field_name, f"is {words!r}", f"some of {', '.join(known)}")
        return
    for word in words:
        if word not in known:
            hint = _spelling_hint(word, known)
            yield Mistake(
                field_name, f"has {word!r}", f"{hint}some of {', '.join(known)}"
            )
            return


def _spelling_hint(word: str, known: Iterable[str]) -> str:
    """Return `seed, or ` for the word seeds; "" if no known word is like it."""
    matches = difflib.get_close_matches(word, [*known], n=1)
    return f"{matches[0]}, or " if matches else ""


def _is_sequence_of_texts(value: Any) -> bool:
    """Return whether this is a list or tuple of texts; a text alone is not."""
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    return is_sequence and all(isinstance(word, str) for word in value)
