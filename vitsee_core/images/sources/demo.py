"""The images that ship with vitsee: demo:train, demo:test, demo:all."""

from __future__ import annotations

from dataclasses import replace

from vitsee_core import demo
from vitsee_core.images.errors import DataError
from vitsee_core.images.image_source import ImageSource
from vitsee_core.images.sources.arrays import open_npz


def open_demo(data: str, split: str | None) -> ImageSource:
    """Raises DataError: no such part of it."""
    expression = data.partition(":")[2]
    if expression and split is not None:
        raise DataError(f"{data} names a split already; leave --split {split} out")
    if expression.removeprefix("demo:") in demo.models():
        known = ", ".join(f"demo:{name}" for name in demo.SPLITS)
        raise DataError(f"{data} is a model; the demo's data: {known}")
    return replace(open_npz(demo.data_file(), "demo").part(expression or split or "all"), name=data)
