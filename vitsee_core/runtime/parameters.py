"""The parameters of an analysis, read from its signature: their types, defaults and options.

    def run(
        *stores: Store,
        ks: Annotated[Sequence[int], Option("Number of neighbours.", "--k", least=1)] = (20,),
        execution: Annotated[Execution, Offers("images seed jobs memory", dask="slabs")] = DEFAULT,
    ) -> Table: ...

Annotations are evaluated by `typing.get_type_hints`, so that the names in them have to be imported
when the program runs, too, and not for type checkers alone. The return annotation is left out: a
figure's type need not be imported.
"""

from __future__ import annotations

import collections.abc
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from vitsee_core.runtime.options import Fields, Gather, Offers, Option, PythonOnly
from vitsee_stores.errors import VitseeError

REQUIRED = inspect.Parameter.empty  # the default of a parameter that has none
OPTION_TYPES = (int, float, bool, str, Path)  # what an option without `parse` can become


class DeclarationError(VitseeError):
    """An analysis that is declared wrongly; names its module, the field, and what was expected."""


class DeclaredParameter(NamedTuple):
    """A parameter: its type, without `Annotated`; its default, `REQUIRED` for none; its kind, as
    `inspect` has it; and its metadata."""

    name: str
    annotation: Any
    default: Any
    kind: Any
    about: Option | Gather | Fields | Offers | PythonOnly | None

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that a single value may have: those of a union, and of a sequence's items."""
        return tuple(dict.fromkeys(_item_types(self.annotation)))

    @property
    def is_sequence(self) -> bool:
        """Whether it takes several values: `Sequence[int]`, `Path | Sequence[Path]`."""
        return any(_is_sequence(member) for member in _members(self.annotation))

    @property
    def is_optional(self) -> bool:
        """Whether None is one of its values."""
        return type(None) in _members(self.annotation)

    @property
    def takes_stores(self) -> bool:
        from vitsee_stores import Store  # not imported for commands that have no analysis

        return Store in self.types

    @property
    def text(self) -> str:
        """The annotation as a reader writes it: `Sequence[str] | None`."""
        text = inspect.formatannotation(self.annotation)
        return re.sub(r"\b(?:[^\W\d]\w*\.)+(?=\w)", "", text)


def parameters_of(function: Callable[..., Any]) -> dict[str, DeclaredParameter]:
    """Name -> parameter of a function or a dataclass. Raises DeclarationError: an annotation that
    cannot be evaluated."""
    function = inspect.unwrap(function)
    names = getattr(function, "__globals__", None) or vars(
        sys.modules[function.__module__]
    )
    parameters = {}
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = _evaluate(parameter.annotation, names, f"{_place(function)}, {name}")
        about = None
        if typing.get_origin(annotation) is Annotated:
            annotation, about, *_ = typing.get_args(annotation)
        parameters[name] = DeclaredParameter(
            name=name,
            annotation=annotation,
            default=parameter.default,
            kind=parameter.kind,
            about=about,
        )
    return parameters


def keywords_of(function: Callable[..., Any]) -> dict[str, DeclaredParameter]:
    """Name -> parameter as callers give it: the fields of a `Fields` in place of itself."""
    keywords = {}
    for name, parameter in parameters_of(function).items():
        if isinstance(parameter.about, Fields):
            for field_name, field in parameters_of(parameter.annotation).items():
                keywords[field_name] = field._replace(kind=inspect.Parameter.KEYWORD_ONLY)
        else:
            keywords[name] = parameter
    return keywords


def options_of(function: Callable[..., Any]) -> dict[str, DeclaredParameter]:
    """Name -> parameter with an option, of a function or dataclass; a `Gather` and `Fields` are
    replaced by their fields."""
    options = {}
    for parameter in keywords_of(function).values():
        if isinstance(parameter.about, Option) and not parameter.takes_stores:
            options[parameter.name] = parameter
        elif isinstance(parameter.about, Gather):
            gathered = options_of(parameter.about.kind)
            if (
                parameter.default is not REQUIRED
            ):  # without it none of its fields is required
                for name, field in gathered.items():
                    if field.default is REQUIRED:
                        gathered[name] = field._replace(default=None)
            for name in parameter.about.fields or gathered:
                options[name] = gathered[name]
    return options


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}: {function.__qualname__}"


def _evaluate(annotation: Any, names: Mapping[str, Any], place: str) -> Any:
    """The type that an annotation, which may be text, stands for. Raises DeclarationError: names
    the place."""
    if annotation is inspect.Parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, globalns=dict(names), include_extras=True)[
            "it"
        ]
    except NameError as error:
        raise DeclarationError(
            f"{place}: {error}; expected types and options that are imported (not below "
            "`if TYPE_CHECKING`) or defined above"
        ) from error
    except Exception as error:
        raise DeclarationError(
            f"{place}: its annotation cannot be evaluated ({type(error).__name__}: {error})"
        ) from error


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; of another type that one."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is_sequence(annotation: Any) -> bool:
    return typing.get_origin(annotation) is collections.abc.Sequence


def _item_types(annotation: Any) -> typing.Iterator[Any]:
    for member in _members(annotation):
        if _is_sequence(member):
            for item in typing.get_args(member):
                yield from _item_types(item)
        elif member is not type(None):
            yield member
