"""Warnings of Pillow and libtiff about an image, collected while it is read instead of printed.

Pillow warns by Python's `warnings`, a line for each damaged tag, and logs what is wrong with a
TIFF; libtiff, inside it, writes to stderr. All are heard for the thread that reads an image alone:
Python's own recorder changes the whole process, where the model runs beside the loading.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MODULES = r"PIL\."
# Each time, not once a place in the code: it is counted by image.
_FILTER = ("always", None, Warning, re.compile(_MODULES), 0)


_LOGGING_MODULES = ("PIL.ImageFile", "PIL.PngImagePlugin", "PIL.TiffImagePlugin")


class _Heard(threading.local):
    """The messages of the image that this thread reads; None while it reads none."""

    def __init__(self) -> None:
        self.messages: list[str] | None = None


_heard = _Heard()
_before: Any = None


def _show(message: Any, *about: Any, **more: Any) -> None:
    """In place of `warnings.showwarning`: what is not about an image goes on to that."""
    if _heard.messages is None:
        _before(message, *about, **more)
    else:
        _heard.messages.append(str(message))


def _hear_log(record: logging.LogRecord) -> bool:
    """A filter of the log: whether a record goes on, which is not about an image."""
    if _heard.messages is None:
        return True
    if record.levelno >= logging.WARNING:
        _heard.messages.append(record.getMessage())
    return False


@contextmanager
def heard_warnings() -> Iterator[list[str]]:
    """Context whose list gets what Pillow and libtiff say in this thread; at its end the context
    around it, if there is one, gets it, too."""
    global _before
    # Anew each time: whoever records warnings takes both away at the end.
    if warnings.showwarning is not _show:
        _before = warnings.showwarning
        warnings.showwarning = _show
    if _FILTER not in warnings.filters:
        warnings.filterwarnings("always", module=_MODULES)
    for module in _LOGGING_MODULES:
        logging.getLogger(module).addFilter(_hear_log)  # added once
    outer = _heard.messages
    messages: list[str] = []
    _heard.messages = messages
    try:
        yield messages
    finally:
        _heard.messages = outer
        if outer is not None:
            outer.extend(messages)


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)


def _hear_libtiff(module: bytes | None, text: bytes | None, values: int | None) -> None:
    """libtiff's message without the values in it, which only C can put there."""
    del text, values
    if _heard.messages is not None:
        _heard.messages.append(f"libtiff: {(module or b'').decode('utf-8', 'replace')}")


_handler = _Handler(_hear_libtiff)  # must live as long as libtiff may call it


@functools.cache
def hear_libtiff() -> None:
    """Hand libtiff's messages to `heard_warnings`; once a process, before the first TIFF."""
    try:
        library = ctypes.CDLL(importlib.import_module("PIL._imaging").__file__)
        handlers = (library.TIFFSetErrorHandler, library.TIFFSetWarningHandler)
    except (OSError, AttributeError):
        return  # a build of Pillow without libtiff, or with one that hides its names
    for set_handler in handlers:
        set_handler.argtypes = [_Handler]
        set_handler.restype = ctypes.c_void_p
        set_handler(_handler)
