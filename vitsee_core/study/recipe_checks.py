"""Checks names and command lines of a study in a file, which a stranger may have written: all that
its steps write lies in the study's folder."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vitsee_core.runtime import registry
from vitsee_core.tables.files import TABLE_ENDINGS
from vitsee_stores.schema import check_name, unexpected

# The names of stores are words of commands, where `=` and `:` stand before a store.
STORE_NAME = re.compile(r"[\w+][\w.+-]*")


def check_store_name(name: str) -> None:
    """Check that a store can have a name.

    Raises:
        ValueError: it cannot.
    """
    check_name(name, "the name of a store")
    if not STORE_NAME.fullmatch(name) or name.endswith(".zarr"):
        expected = "letters, digits, _, +, . and -, and no .zarr at its end"
        raise unexpected("the name of a store", name, expected)


def check_model_name(name: str, where: str) -> None:
    """Check that a model's name is one word that is not an option.

    Args:
        name: of the model.
        where: the place in the file, for the message.

    Raises:
        ValueError: it is empty, an option, or has control characters.
    """
    if not name.strip() or name.startswith("-") or not name.isprintable():
        raise unexpected(where, name, "a model as for vitsee extract")


def check_images(words: Sequence[str], where: str) -> None:
    """Check that the options of a store name its images.

    Raises:
        ValueError: they do not.
    """
    if "--data" not in words[:-1]:
        raise ValueError(f"{where} has no --data DATA, expected the images of the store")


def check_analysis(words: Sequence[str], where: str) -> None:
    """Check that a command is an analysis, and its result a file beside the others.

    Raises:
        ValueError: it is another command, or its result would be elsewhere.
    """
    if not words:
        raise ValueError(f"{where} is empty, expected an analysis and its options")
    # Other commands of vitsee write stores, or remove what is cached.
    analyses = [name.replace("_", "-") for name in registry.names()]
    if words[0] not in analyses:
        raise unexpected(where, words[0], f"an analysis: {', '.join(analyses)}")
    values = [words[i + 1 : i + 2] for i, word in enumerate(words) if word == "-o"]
    if len(values) > 1:
        raise ValueError(f"{where} has -o {len(values)} times, expected it once")
    for value in values:
        check_result_name("".join(value), f"-o of {where}")


def check_result_name(name: str, where: str) -> None:
    """Check that a table's name has neither folder nor another ending than a table's.

    Raises:
        ValueError: it has.
    """
    check_name(name, where)
    if name.startswith("-") or not name.endswith(TABLE_ENDINGS):
        listed = ", ".join(TABLE_ENDINGS)
        raise unexpected(where, name, f"the name of a table ({listed}) without a folder")
