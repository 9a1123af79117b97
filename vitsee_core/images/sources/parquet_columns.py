"""The columns of parquet files that are read: which hold images and labels, and what labels say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitsee_core.images.class_labels import NO_LABELS, label_text
from vitsee_core.images.errors import DataError
from vitsee_core.images.sources.base import Coded, SourceRequest

BYTES = "bytes"  # Hugging Face's fields of an image
PATH = "path"
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")
NUMBERS = "numbers"  # kinds of labels
NAMES = "names"


@dataclass(frozen=True)
class ParquetColumns:
    """The columns of a parquet file that are read.

    Attributes:
        image: the column of images.
        nested: whether images are structs with `bytes` and `path`, not bytes.
        label: the column of labels, None for no labels.
    """

    image: str
    nested: bool
    label: str | None

    @property
    def field(self) -> str:
        """The field of the image column with the encoded images, "" for the column itself."""
        return BYTES if self.nested else ""

    @property
    def encoded(self) -> str:
        """The column, or field of a struct, with the encoded images, in words."""
        return f"{self.image}.{self.field}" if self.nested else self.image


def choose_columns(request: SourceRequest, schema: Any) -> ParquetColumns:
    """Return the columns of images and labels, by the request's options or by their types.

    Raises:
        DataError: a column is missing or of another type, or several columns have images.
    """
    from pyarrow import types

    def is_bytes(kind: Any) -> bool:
        """Return whether a type is that of bytes."""
        is_kind = (types.is_binary, types.is_large_binary, types.is_binary_view)
        return any(test(kind) for test in is_kind)

    def is_nested(kind: Any) -> bool:
        """Return whether a type is a struct with a field `bytes`."""
        fields = kind if types.is_struct(kind) else ()
        return any(field.name == BYTES and is_bytes(field.type) for field in fields)

    kinds: dict[str, Any] = {}
    for field in schema:
        if field.name in kinds:
            raise DataError(
                f"has two columns called {field.name!r}; expected columns of different names"
            )
        kinds[field.name] = field.type
    listed = ", ".join(f"{name} ({str(kind)[:40]})" for name, kind in kinds.items())
    label_column = request.label_column
    without_labels = label_column == NO_LABELS and NO_LABELS not in kinds
    if without_labels:
        label_column = None
    for option, column in (
        ("--image-column", request.image_column),
        ("--label-column", label_column),
    ):
        if column is not None and column not in kinds:
            raise DataError(f"has no column {column!r} ({option}); it has: {listed}")
    structs = [name for name, kind in kinds.items() if is_nested(kind)]
    candidates = structs or [name for name, kind in kinds.items() if is_bytes(kind)]
    if request.image_column is None and not candidates:
        raise DataError(
            f"has no column of images; expected one of bytes, or of structs with {BYTES} and "
            f"{PATH}; it has: {listed}"
        )
    if request.image_column is None and len(candidates) > 1:
        raise DataError(
            f"has {len(candidates)} columns of images; choose one with --image-column of: {listed}"
        )
    image = request.image_column or candidates[0]
    if not is_nested(kinds[image]) and not is_bytes(kinds[image]):
        raise DataError(
            f"has no images in the column {image!r}, which is {str(kinds[image])[:60]}; expected "
            "bytes, or a struct with bytes and path"
        )
    label = label_column
    if label is None and not without_labels:
        label = next((name for name in LABEL_COLUMNS if name in kinds), None)
    if label is not None:
        kind = kinds[label]
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not holds_labels(kind):
            raise DataError(
                f"has no labels in the column {label!r}, which is {str(kind)[:60]}; expected "
                "class numbers or names (--label-column COLUMN names another, or none)"
            )
    return ParquetColumns(image, is_nested(kinds[image]), label)


def holds_labels(kind: Any) -> bool:
    """Return whether a pyarrow type can hold labels.

    Floats can, since a column of whole numbers with gaps is one of floats.
    """
    from pyarrow import types

    is_kind = (
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_null,
        types.is_string,
        types.is_large_string,
        types.is_string_view,
    )
    return any(test(kind) for test in is_kind)


def coded_labels(column: Any, missing: str) -> Coded:
    """Return a column of labels as codes and texts.

    Args:
        column: a pyarrow array of a type that `holds_labels`, or a dictionary of one.
        missing: the text of null; "" is no label.
    """
    import pyarrow
    from pyarrow import types

    # Polars and pandas write dictionaries with indices of several widths, which pyarrow's own
    # encoding does not have, and views, which it cannot encode.
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_string_view(column.type):
        column = column.cast(pyarrow.large_string())
    # Encoded by pyarrow, so that a million labels do not become Python objects.
    encoded = column.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    texts = [missing if value is None else label_text(value) for value in values]
    indices = encoded.indices.fill_null(len(texts) if missing else -1)
    codes = indices.to_numpy(zero_copy_only=False).astype(np.int32)
    if missing:
        texts.append(missing)
    return codes, texts


def kind_of_labels(kind: Any, texts: Sequence[str]) -> str:
    """Return whether labels of a pyarrow type are `NUMBERS` or `NAMES`; "" where they may be both,
    as texts of digits are."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if not texts or types.is_null(kind):
        return ""
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return NUMBERS
    return "" if all(text.isdecimal() for text in texts) else NAMES


def nulls_are_nan(schema: Any, column: str) -> bool:
    """Return whether nulls of a column are what pandas, which wrote it, has for missing labels."""
    try:
        metadata = json.loads((schema.metadata or {})[b"pandas"])
        return any(entry["name"] == column for entry in metadata["columns"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return False


def declared_class_names(schema: Any, label: str | None) -> list[str] | None:
    """Return the class names that Hugging Face's library writes beside the schema, or None."""
    try:
        metadata = json.loads((schema.metadata or {})[b"huggingface"])
        return [str(name) for name in metadata["info"]["features"][label]["names"]]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
