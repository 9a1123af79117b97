"""What an analysis is: one declaration, which is checked as soon as it is made.

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
from typing import TYPE_CHECKING, Any

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
    ADDED,
    BASELINE,
    PAIR,
    REPLICATES,
    SITE,
    VALUES,
    is_known,
)
from vitsee_core.tables.headlines import Answer
from vitsee_core.tables.results import Table
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What an analysis may need of a model.
NEEDS = ("sites", "grid", "attention", "heads", "residual", "images")
COLUMN_TYPES = (str, int, float)


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
        readings: kind -> that, where the notes of tables have several kinds.
        source: the papers, with years and figures.
        columns: those of the table, in their order.
        other_columns: those of other tables that it makes with some options.
        column_types: column -> `str`, `int` or `float`, of columns that no other table has.
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
        for field_name, found, expected in _mistakes(self):
            raise DeclarationError(
                f"{self.module}: {field_name} {found}; expected {expected}"
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
        """The figure of a table; of one over a training the chart along its steps.

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
            metrics = ", ".join(_metrics_of(table.frame))
            raise DeclarationError(
                f"{self.module}: plot drew nothing of a table with metric {metrics}; expected a "
                f"figure of each of its metrics ({', '.join(self.metrics)})"
            )
        return figure

    def check_table(self, table: Any) -> None:
        """Check what `run` returned. Raises DeclarationError: it is not a table, has columns or
        metrics that are not declared, columns of other types, or no value."""
        if not isinstance(table, Table):
            raise DeclarationError(
                f"{self.module}: run returned a {type(table).__name__}; expected a Table"
            )
        frame = table.written
        declared = {*self.all_columns, *ADDED}
        if undeclared := [name for name in frame.columns if name not in declared]:
            raise DeclarationError(
                f"{self.module}: run returned the columns {', '.join(undeclared)}, which columns "
                f"do not name; expected some of {', '.join(self.all_columns)}"
            )
        for name, kind in self.column_types.items():
            if name in frame.columns and not _holds(frame.schema[name], kind):
                raise DeclarationError(
                    f"{self.module}: run returned {name} as {frame.schema[name]}; expected "
                    f"{kind.__name__}, as column_types says"
                )
        for metric in _metrics_of(frame):
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


def _metrics_of(frame: pl.DataFrame) -> list[str]:
    if "metric" not in frame.columns:
        return []
    return [
        str(metric) for metric in frame["metric"].unique(maintain_order=True).drop_nulls()
    ]


def _has_values(frame: pl.DataFrame) -> bool:
    return "value" in frame.columns and frame["value"].count() > 0


def _holds(kind: pl.DataType, expected: type) -> bool:
    """Whether a column of this type is one of `COLUMN_TYPES`; an empty column may be any."""
    if kind == pl.Null:
        return True
    if expected is str:
        return kind in (pl.String, pl.Categorical)
    return kind.is_integer() if expected is int else kind.is_numeric()


# ---------------------------------------------------------------------------- what is checked

Mistake = tuple[str, str, str]  # the field, what was found, what was expected


def _mistakes(analysis: Analysis) -> Iterable[Mistake]:
    """The mistakes of a declaration, in the order of its fields."""
    yield from _mistakes_of_words(analysis)
    yield from _mistakes_of_columns(analysis)
    yield from _mistakes_of_functions(analysis)


def _mistakes_of_words(analysis: Analysis) -> Iterable[Mistake]:
    for name in ("module", "question", "help", "reading", "source"):
        text = getattr(analysis, name)
        if not isinstance(text, str):
            yield name, f"is {text!r}", "a text"
    if analysis.module not in sys.modules:
        yield "module", f"is {analysis.module!r}", "__name__"
    if not analysis.docstring:
        yield "the docstring", "is empty", "`Title: question?` and what is computed"
    if analysis.question not in ("", *QUESTIONS):
        yield "question", f"is {analysis.question!r}", f"one of {', '.join(QUESTIONS)}"
    for name in ("reading", "source"):
        if not getattr(analysis, name).strip():
            yield (
                name,
                "is empty",
                "how to read the figure" if name == "reading" else "the papers",
            )
    if analysis.needs is not None:
        yield from _unknown_words("needs", analysis.needs, NEEDS)


def _mistakes_of_columns(analysis: Analysis) -> Iterable[Mistake]:
    for columns in (analysis.columns, *analysis.other_columns):
        name = "columns" if columns is analysis.columns else "other_columns"
        if not _are_words(columns) or not {"metric", "value"} <= {*columns}:
            yield (
                name,
                f"is {columns!r}",
                "a tuple of names with metric and value among them",
            )
            return
        if twice := [column for column in columns if list(columns).count(column) > 1]:
            yield name, f"has {twice[0]} twice", "every column once"
    for column, kind in analysis.column_types.items():
        if kind not in COLUMN_TYPES:
            yield "column_types", f"has {column} as {kind!r}", "str, int or float"
    for column in analysis.all_columns:
        if not is_known(column) and column not in analysis.column_types:
            known = (
                *SITE,
                *PAIR,
                *VALUES,
                BASELINE,
                "head",
                "class",
                "row",
                "col",
                "token",
            )
            yield (
                "columns",
                f"has {column!r}, which is not a column of vitsee's tables",
                f"{_closest(column, known)}its type in column_types, as "
                f"column_types={{{column!r}: float}}",
            )
    for name in ("column_types", "meanings"):
        yield from _unknown_words(name, getattr(analysis, name), analysis.all_columns)
    if REPLICATES in analysis.all_columns:
        yield (
            "columns",
            f"has {REPLICATES!r}",
            "no such column: rows have that key without it",
        )
    if not _are_words(analysis.metrics) or not analysis.metrics:
        yield "metrics", f"is {analysis.metrics!r}", "the names in the column metric"
    elif analysis.glance_metric:
        yield from _unknown_words(
            "glance_metric", [analysis.glance_metric], analysis.metrics
        )


def _mistakes_of_functions(analysis: Analysis) -> Iterable[Mistake]:
    for name in ("run", "plot"):
        if not callable(getattr(analysis, name)):
            yield name, f"is {getattr(analysis, name)!r}", "a function"
            return
    for name in ("headline", "at_a_glance", "of_arrays", "read_inputs"):
        function = getattr(analysis, name)
        if function is not None and not callable(function):
            yield name, f"is {function!r}", "a function, or None"
    if analysis.needs is None:  # of tables, which no command gives stores
        return
    parameters = parameters_of(analysis.run)
    if not hasattr(analysis.run, "__wrapped__"):
        yield "run", "has no decorator", "@analysis above it"
    if not any(parameter.takes_stores for parameter in parameters.values()):
        yield "run", "has no parameter of the type Store", "*stores: Store"
    if not analysis.help:  # its command has a file of its own, which declares the options
        return
    if "execution" not in parameters:
        yield (
            "run",
            "has no parameter execution",
            "execution: Annotated[Execution, Offers(...)]",
        )
    for parameter in parameters.values():
        yield from _mistakes_of_parameter("run", parameter, options_of(analysis.run))
    drawing = iter(parameters_of(analysis.plot).values())
    if next(drawing, None) is None:
        yield "plot", "takes nothing", "plot(table)"
    for parameter in drawing:
        yield from _mistakes_of_parameter("plot", parameter, options_of(analysis.plot))


def _mistakes_of_parameter(
    function: str, parameter: DeclaredParameter, options: Mapping[str, DeclaredParameter]
) -> Iterable[Mistake]:
    """The mistakes of a parameter of `run` or `plot`."""
    place = f"{function}, {parameter.name}"
    about = parameter.about
    if parameter.name == "execution":
        if not isinstance(about, Offers):
            yield place, "has no Offers", 'Annotated[Execution, Offers("images seed")]'
        else:
            yield from _unknown_words(
                f"{place}, Offers", about.fields.split(), EXECUTION_OPTIONS
            )
    elif isinstance(about, (Gather, Fields)):
        kind = about.kind if isinstance(about, Gather) else parameter.annotation
        for name, field_of_it in parameters_of(kind).items():
            yield from _mistakes_of_parameter(
                f"{function}, {parameter.name}",
                field_of_it,
                {**options, name: field_of_it},
            )
    elif parameter.takes_stores or isinstance(about, PythonOnly):
        return
    elif not isinstance(about, Option):
        yield (
            place,
            f"is {parameter.text} without an Option",
            f"{parameter.name}: Annotated[{parameter.text}, Option(...)], or a shared one like "
            "SITES",
        )
    else:
        yield from _mistakes_of_option(place, parameter, about, options)


def _mistakes_of_option(
    place: str,
    parameter: DeclaredParameter,
    about: Option,
    options: Mapping[str, DeclaredParameter],
) -> Iterable[Mistake]:
    for kind in parameter.types:
        if kind not in OPTION_TYPES and about.parse is None:
            yield (
                place,
                f"is {parameter.text}",
                "int, float, bool, str, Path, or a Sequence of these",
            )
            return
    if about.only_with:
        yield from _unknown_words(f"{place}, only_with", about.only_with[:1], options)
    default = parameter.default
    words = default if parameter.is_sequence else (default,)
    if about.choices and isinstance(words, tuple):
        given = [word for word in words if isinstance(word, str)]
        yield from _unknown_words(f"{place}, its default", given, about.choices)


def _unknown_words(
    field_name: str, words: Any, known: Collection[str]
) -> Iterable[Mistake]:
    """The first of the words that is not known."""
    if isinstance(words, Mapping):
        words = tuple(words)
    if not _are_words(words):
        yield field_name, f"is {words!r}", f"some of {', '.join(known)}"
        return
    for word in words:
        if word not in known:
            yield (
                field_name,
                f"has {word!r}",
                f"{_closest(word, known)}some of {', '.join(known)}",
            )
            return


def _closest(word: str, known: Iterable[str]) -> str:
    """`seed; that is ` for seeds; "" if nothing is like it."""
    near = difflib.get_close_matches(word, [*known], n=1)
    return f"{near[0]}, or " if near else ""


def _are_words(value: Any) -> bool:
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    return is_sequence and all(isinstance(word, str) for word in value)
