"""The analyses that are run at every step of a training, and their numbers for loggers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitsee_core.extraction.options import OptionError
from vitsee_core.runtime import registry
from vitsee_core.tables.headlines import SETTINGS
from vitsee_core.tables.results import Table
from vitsee_core.types import pl

# The steps that others are compared with: words behind the colon of `cka:first`.
FIRST = "first"
LAST = "last"
PREVIOUS = "previous"


@dataclass(frozen=True)
class Measurement:
    """An analysis that is run at every step.

    Attributes:
        stem: name of its table without suffix, `cka-first`.
        run: function of the analysis' module.
        options: keywords of that function.
        against: the step whose store is compared with every other's: `FIRST`, `LAST`,
            `PREVIOUS`; "" for an analysis of one store.
        learns: whether it trains classifiers, on a store of its own images.
    """

    stem: str
    run: Callable[..., Table]
    options: Mapping[str, Any]
    against: str = ""
    learns: bool = False


def measurements(
    analyses: Sequence[str] | Mapping[str, Mapping[str, Any]],
    references: Sequence[str],
    *,
    with_train: bool,
) -> list[Measurement]:
    """Return the analyses of these names, checked.

    A name is that of a command, `attn-dist` or `attn_dist`. `cka:first` names an analysis of
    two stores: that of the first step and that of each other step.

    Args:
        analyses: names, or name -> keywords of the analysis.
        references: the words that are allowed after the colon.
        with_train: whether there are images to train on.

    Raises:
        OptionError: an unknown analysis or keyword, an analysis that does not take one store,
            or one that trains, without images for it.
    """
    # A text is a sequence, too: it is refused below.
    options_by_name = analyses
    if not isinstance(options_by_name, Mapping):
        options_by_name = {name: {} for name in options_by_name}
    if isinstance(analyses, str) or not options_by_name:
        raise OptionError(
            f"analyses are {analyses!r}; expected a list of names of commands"
        )
    return [
        _measurement(name, dict(options), references, with_train)
        for name, options in options_by_name.items()
    ]


def _measurement(
    name: str, options: dict[str, Any], references: Sequence[str], with_train: bool
) -> Measurement:
    """Return one analysis by its name and keywords; arguments as for `measurements`."""
    command, colon, against = name.replace("_", "-").partition(":")
    analysis = command.replace("-", "_")
    if analysis not in registry.names():
        raise OptionError(f"no analysis {command!r}; expected the name of a command")
    run = registry.load(analysis).run
    parameters = inspect.signature(run).parameters
    # An analysis says by its parameters what it is: `train` learns, `pairs` compares.
    learns = "train" in parameters
    if unknown := [key for key in options if key not in parameters]:
        raise OptionError(
            f"{command} has no keyword {unknown[0]!r}; it has {', '.join(parameters)}"
        )
    if colon and against not in references:
        raise OptionError(
            f"{name!r}; expected {command}, or with : one of {', '.join(references)}"
        )
    if colon and "pairs" in parameters:
        # Of two stores of one model, equal depths are compared: all pairs would be squared.
        options.setdefault("pairs", "same-depth")
    if learns and not with_train:
        raise OptionError(
            f"{command} learns from images: give train=, others of the same classes"
        )
    stem = f"{command}-{against}" if colon else command
    return Measurement(stem, run, options, against, learns)


def scalars(stem: str, table: Table) -> dict[str, float]:
    """Return the numbers of a table for a logger: `STEM/METRIC/SITE` -> mean value.

    A mean is over the finite rows of a metric and site, so over heads and classes. Two sites
    that differ are both named, and settings (k, shots, tokens) if they vary. Rows of baselines
    are left out.
    """
    frame = table.written
    # Columns that the table lacks are null, so that one way serves all tables.
    for name in ("site", "site_a", "site_b", "baseline", *SETTINGS):
        if name not in frame.columns:
            frame = frame.with_columns(pl.lit(None, pl.String).alias(name))
    settings = [name for name in SETTINGS if frame[name].n_unique() > 1]
    sites = ("site", "site_a", "site_b")
    rows = frame.filter(pl.col("value").is_finite(), pl.col("baseline").is_null())
    means = rows.group_by("metric", *sites, *settings, maintain_order=True).agg(
        pl.col("value").mean()
    )
    numbers = {}
    for row in means.iter_rows(named=True):
        # dict.fromkeys: two equal sites are named once
        site = " ~ ".join(
            dict.fromkeys(str(row[name]) for name in sites if row[name] is not None)
        )
        words = [stem, row["metric"], site]
        words += [f"{name}={row[name]}" for name in settings]
        numbers["/".join(word for word in words if word)] = float(row["value"])
    return numbers
