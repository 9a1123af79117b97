"""How to read an analysis' figure and where it comes from, as each analysis says beside itself.

The first line of an analysis' docstring is its title and the question that it answers. `READING`
is a few sentences on what its figure shows and what misleads in it, `SOURCE` the papers and
figures; one of several kinds of figures has `READINGS` too, by the `kind` in its table's notes.
`headline(table)`, where there is one, gives the answer in a line per store; `AT_A_GLANCE` the
metric whose curves say most, where it is not the first, or "" where the figure itself does, drawn
of the rows of `at_a_glance(table)` where there is such a function.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType

from vitsee_core.figures.training_charts import answers_over_training
from vitsee_core.runtime.registry import load, own_names
from vitsee_core.tables.headlines import Answer
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import said_of
from vitsee_stores.errors import VitseeError

DEPTH = (
    "Relative depth counts sites of one kind from 0, the first (of block outputs what enters the "
    "first block), to 1, the last."
)


OVER_TRAINING = (
    "Each curve is a layer over the steps of a training, coloured from input to output; the map "
    "beside has a column for each step and a row for each layer. A layer's value is the mean over "
    "its heads or cells where it has several, with a band from the least to the largest; else the "
    "band is the 95 % interval over images."
)


@dataclass(frozen=True)
class Caption:
    """title: the analysis in a few words; question: what it answers, with a question mark; reading,
    source: see above; glance: the metric whose curves stand for it all, "" where the figure does,
    None where the table's first metric does."""

    title: str
    question: str
    reading: str
    source: str
    glance: str | None = None


def caption(analysis: ModuleType, table: Table | None = None) -> Caption:
    """The caption of an analysis' figure, of this table where it has several kinds."""
    first_line = (inspect.getdoc(analysis) or "").partition("\n\n")[0].replace("\n", " ")
    title, colon, question = first_line.partition(": ")
    reading: str = analysis.READING
    if table is not None:
        kind = str(table.notes.get("kind", "")).replace("-", "_")
        reading = getattr(analysis, "READINGS", {}).get(kind, reading)
        if table.step_unit:
            reading = OVER_TRAINING
        reading = said_of(reading, table.notes)
    if "depth" in reading and "elative depth" not in reading:
        reading = f"{reading} {DEPTH}"
    if not colon:
        title, question = first_line.rstrip("."), ""
    question = question.strip()
    question = question[:1].upper() + question[1:]
    glance: str | None = getattr(analysis, "AT_A_GLANCE", None)
    return Caption(title, question, reading, analysis.SOURCE, glance)


def headline(analysis: ModuleType, table: Table) -> list[Answer]:
    """The table's answers, a line per store, or per model over its training; none where the
    analysis has no such line."""
    if table.step_unit:
        try:
            return answers_over_training(table)
        except VitseeError:  # several values of a layer, whose figure says so
            return []
    of_table = getattr(analysis, "headline", None)
    answers = of_table(table) if of_table and len(table) else []
    return [(who, said_of(text, table.notes)) for who, text in answers]


def captions() -> dict[str, Caption]:
    """Command -> the caption of its figure, of every analysis of vitsee's own."""
    return {name.replace("_", "-"): caption(load(name)) for name in own_names()}
