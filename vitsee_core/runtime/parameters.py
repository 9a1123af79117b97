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
    """A parameter of a function, or a field of a dataclass, with what its annotation declares.

    Attributes:
        name: the parameter's name.
        annotation: its type, without `Annotated`.
        default: its default; `REQUIRED` if it has none.
        kind: as in `inspect.Parameter`, e.g. `VAR_POSITIONAL` for `*stores`.
        metadata: the second argument of `Annotated`; None without one.
    """

    name: str
    annotation: Any
    default: Any
    kind: Any
    metadata: Option | Gather | Fields | Offers | PythonOnly | None

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that a single value may have; for a sequence, the types of its items."""
        return tuple(dict.fromkeys(_single_types(self.annotation)))

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
        """Whether its values are stores."""
        from vitsee_stores import Store  # not imported for commands that have no analysis

        return Store in self.types

    @property
    def text(self) -> str:
        """The annotation as a reader writes it: `Sequence[str] | None`."""
        text = inspect.formatannotation(self.annotation)
        return re.sub(r"\b(?:[^\W\d]\w*\.)+(?=\w)", "", text)


def parameters_of(function: Callable[..., Any]) -> dict[str, DeclaredParameter]:
    """Return name -> parameter of a function or a dataclass, in order.

    Raises:
        DeclarationError: an annotation cannot be evaluated.
    """
    function = inspect.unwrap(function)
    names = getattr(function, "__globals__", None) or vars(
        sys.modules[function.__module__]
    )
    parameters = {}
    for name, parameter in inspect.signature(function).parameters.items():
        location = f"{function.__module__}: {function.__qualname__}, {name}"
        annotation = _evaluate(parameter.annotation, names, location)
        metadata = None
        if typing.get_origin(annotation) is Annotated:
            annotation, metadata, *_ = typing.get_args(annotation)
        parameters[name] = DeclaredParameter(
            name=name,
            annotation=annotation,
            default=parameter.default,
            kind=parameter.kind,
            metadata=metadata,
        )
    return parameters


def keywords_of(function: Callable[..., Any]) -> dict[str, DeclaredParameter]:
    """Return name -> parameter as callers of the function give it.

    A parameter with `Fields` is replaced by the fields of its dataclass.
    """
    keywords = {}
    for name, parameter in parameters_of(function).items():
        if isinstance(parameter.metadata, Fields):
            for field_name, field in parameters_of(parameter.annotation).items():
                keywords[field_name] = field._replace(kind=inspect.Parameter.KEYWORD_ONLY)
        else:
            keywords[name] = parameter
    return keywords


def options_of(function: Callable[..., Any]) -> dict[str, DeclaredParameter]:
    """Return name -> parameter for every option of a function or dataclass.

    A parameter with `Gather` or `Fields` is replaced by the options of its dataclass.
    """
    options = {}
    for parameter in keywords_of(function).values():
        if isinstance(parameter.metadata, Option) and not parameter.takes_stores:
            options[parameter.name] = parameter
        elif isinstance(parameter.metadata, Gather):
            gathered = options_of(parameter.metadata.kind)
            if parameter.default is not REQUIRED:
                # All options of the group may be left out, so that none of them is required.
                for name, field in gathered.items():
                    if field.default is REQUIRED:
                        gathered[name] = field._replace(default=None)
            for name in parameter.metadata.fields or gathered:
                options[name] = gathered[name]
    return options


def _evaluate(annotation: Any, names: Mapping[str, Any], location: str) -> Any:
    """Return the type that an annotation stands for.

    Args:
        annotation: a type, or its source text (`from __future__ import annotations`).
        names: the global names of the module that has the annotation.
        location: function and parameter, for the error.

    Raises:
        DeclarationError: the text cannot be evaluated.
    """
    if annotation is inspect.Parameter.empty:
        return Any
    # `get_type_hints` evaluates all annotations of an object at once; one at a time, the error
    # can name the parameter.
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        hints = typing.get_type_hints(holder, globalns=dict(names), include_extras=True)
    except NameError as error:
        raise DeclarationError(
            f"{location}: {error}; expected types and options that are imported (not "
            "below `if TYPE_CHECKING`) or defined above"
        ) from error
    except Exception as error:
        raise DeclarationError(
            f"{location}: its annotation cannot be evaluated ({type(error).__name__}: "
            f"{error})"
        ) from error
    return hints["it"]


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union; for another type, the type alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is_sequence(annotation: Any) -> bool:
    """Return whether a type is a `Sequence[...]`."""
    return typing.get_origin(annotation) is collections.abc.Sequence


def _single_types(annotation: Any) -> typing.Iterator[Any]:
    """Yield the types of single values: `int` and `str` of `Sequence[int] | str | None`."""
    for member in _members(annotation):
        if _is_sequence(member):
            for item in typing.get_args(member):
                yield from _single_types(item)
        elif member is not type(None):
            yield member
