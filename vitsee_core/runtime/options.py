"""Command line options of an analysis, declared in its signature; those that several share.

    def run(
        *stores: Store,
        sites: Annotated[Sequence[str], SITES] = ("blocks",),
        ks: Annotated[Sequence[int], Option("Number of neighbours.", "--k", least=1)] = (20,),
        execution: Annotated[Execution, Offers("images seed jobs memory", dask="slabs")] = DEFAULT,
    ) -> Table: ...

The command line derives its options from this, and `help(run)` its Args (`runtime/parameters.py`
reads the signature). This module knows no terminal, and imports no numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.selectors import GROUPS, WORDS, TokenSelection

# The headings of `vitsee --help`, in their order. An analysis names its own: `question=FLOW`.
STORES = "Make and inspect stores"
SIMILARITY = "How similar layers and models are"
ATTENTION = "Where attention looks"
FLOW = "What flows through the layers"
KNOWLEDGE = "What a layer knows"
RESULTS = "Results of several commands"
QUESTIONS = (STORES, SIMILARITY, ATTENTION, FLOW, KNOWLEDGE, RESULTS)


@dataclass(frozen=True)
class Option:
    """Metadata of a parameter that is an option of the command line.

    Its type follows from the parameter's annotation: `int`, `float`, `Path`, `bool` (a flag) or
    `str`; a `Sequence` makes it repeatable. On `*tests: Store` it means that there may be none.
    """

    help: str
    flag: str = ""  # where it is not --name-of-the-parameter
    alias: str = ""  # another name of the flag
    metavar: str | None = None
    default: str | None = None  # the default in words, where the value does not say it
    choices: Sequence[str] = ()
    parse: Callable[[str], Any] | None = None  # raises VitseeError
    completes: Sequence[str] = ()  # words that the shell offers; others may be given
    # Limits of a number.
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    # (parameter, *values): refused unless that parameter has one of these values, or any.
    only_with: tuple[str, ...] = ()
    # The default that follows from the other parameters, so that the sidecar has it.
    decide: Callable[[Mapping[str, Any]], Any] | None = None
    or_none: bool = False  # the word none, alone, is the empty sequence


@dataclass(frozen=True)
class Gather:
    """Metadata of a parameter that is made of several options.

    Attributes:
        kind: a dataclass, each field of which is an option; `run` gets an instance, or None if a
            required field was left out.
        fields: the fields that this command has; () for all.
    """

    kind: type
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fields:
    """Metadata of a parameter that is a dataclass of options: on the command line and in Python
    callers give its fields, each by its own name, and `run` gets them together."""


# The fields of `Execution` that have an option.
EXECUTION_OPTIONS = ("images", "seed", "device", "jobs", "memory")


@dataclass(frozen=True)
class Offers:
    """Metadata of the parameter `execution`.

    Attributes:
        fields: the options of the command, words of `EXECUTION_OPTIONS` in one text.
        dask: what --dask distributes, a plural; "" for a command without --dask.
        replicates: whether rows have jackknife replicates, which --replicates writes.
    """

    fields: str
    dask: str = ""
    replicates: bool = True


@dataclass(frozen=True)
class PythonOnly:
    """Metadata of a parameter that has no option on the command line.

    Attributes:
        why: what the command line gives in its place.
    """

    why: str


# ---------------------------------------------------------------- options of several analyses

DEPTH_WORDS = "first, last, stage:I, depth:F (0 to 1)"
SITE_WORDS = (*GROUPS, "first", "last", "stage:", "depth:")


def sites_option(default: str | None = None) -> Option:
    """Return an option for sites, by name, glob or group; default: the default in words."""
    return Option(
        f"Sites by name, glob or group ({', '.join(GROUPS)}), or by place: "
        f"{DEPTH_WORDS}. blocks.-1.out counts from the end, !NAME leaves out. "
        "Repeatable, or a comma list.",
        metavar="GLOB",
        default=default,
        completes=SITE_WORDS,
    )


SITES = sites_option()


def blocks_option(default: str = "every block with attention") -> Option:
    """Return an option for whole blocks, by path, glob or depth; default: the default in words."""
    return Option(
        f"Blocks by path or glob (blocks.0, 'blocks.1?'), or by place: {DEPTH_WORDS}. "
        "blocks.-1 counts from the end, !BLOCK leaves out. Repeatable, or a comma list.",
        metavar="BLOCK",
        default=default,
        completes=SITE_WORDS,
    )


_TOKEN_WORDS = {
    "prefix": "class token and registers",
    "mean": "of the patches",
    "mean-all": "of all tokens",
    "rest": "mean of all but the first",
    "each": "one by one",
}
# What makes an image's features one vector; `each` does not.
FEATURE_TOKENS = tuple(word for word in WORDS if word != "each")
CLS_OR_MEAN = "cls where a site has a class token, else mean (over patches)"


def tokens_option(words: Iterable[str] = WORDS, default: str | None = None) -> Option:
    """Return an option for tokens, by one of these words or by ROW,COL of the grid.

    default: the default in words.
    """
    words = tuple(words)
    explained_words = [
        f"{word} ({_TOKEN_WORDS[word]})" if word in _TOKEN_WORDS else word
        for word in words
    ]

    def parse(text: str) -> TokenSelection:
        """Return the selection that the text means. Raises VitseeError: it means none."""
        try:
            return TokenSelection.parse(text, words)
        except SiteError:
            expected = f"{', '.join(words)} or ROW,COL of the grid"
            raise VitseeError(f"{text!r}; expected {expected}") from None

    return Option(
        f"Tokens: {', '.join(explained_words)}, or ROW,COL of the grid.",
        metavar="TOKENS",
        default=default,
        parse=parse,
        completes=words,
    )


def metrics_option(words: Iterable[str], default: str, about: str = "") -> Option:
    """Return the option --metric, whose values are some of these words.

    default: the default in words; about: the help, which says what the metrics are.
    """
    return Option(about, "--metric", default=default, choices=tuple(words))


def image_option(
    what: str, default: str, store: str = "the first store", about: str = ""
) -> Option:
    """Return an option for single images.

    Args:
        what: what is done with an image, a verb: `Draw`.
        default: the default in words.
        store: which store has the images.
        about: further help text.
    """
    text = f"{what} this image, named by its id or its row in {store}{about}."
    return Option(text, metavar="ID", default=default)
