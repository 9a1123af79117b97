"""What a caller may give an analysis in place of what it takes: paths for stores, one name for
several, the fields of `Execution` as keywords."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

from vitsee_core.execution import DEFAULT, Execution
from vitsee_stores.errors import VitseeError
from vitsee_stores.url import Url

if TYPE_CHECKING:
    from vitsee_stores import Store

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


FIELDS = tuple(field.name for field in fields(Execution))


class Analysis(Protocol[P, R_co]):
    """An analysis that also takes paths of stores, and the fields of `Execution` as keywords."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *stores: Store | str | os.PathLike[str] | Url, **kwargs: Any) -> R_co: ...


def analysis(run: Callable[P, R_co]) -> Analysis[P, R_co]:
    """Decorator of an analysis' `run`: a path stands for the store there, a text for a sequence of
    that one text (`sites="blocks.0.out"`), and keywords like `images=1000` for the fields of the
    parameter `execution`, if it has that.

    Which parameters take paths and texts their annotations say: `Store`, `Sequence[Store]`,
    `Sequence[str]`. The signature that `help` shows has the fields of `Execution` by name.

    Raises, when called:
        StoreError: as `open_store`.
        VitseeError: two of the stores have one label.
    """
    signature = inspect.signature(run)
    parameters = signature.parameters
    framed = "execution" in parameters

    @wraps(run)
    def called(*args: Any, **kwargs: Any) -> R_co:
        own = {name: kwargs.pop(name) for name in FIELDS if framed and name in kwargs}
        if own:
            kwargs["execution"] = replace(kwargs.get("execution", DEFAULT), **own)
        bound = signature.bind(*args, **kwargs)
        seen: dict[str, str] = {}
        for name, value in bound.arguments.items():
            kind = str(parameters[name].annotation)
            if "Store" in kind:
                bound.arguments[name] = _opened(value, seen)
            elif kind.startswith("Sequence[str]") and isinstance(value, str):
                bound.arguments[name] = (value,)
        return run(*bound.args, **bound.kwargs)

    if framed:
        called.__signature__ = _spelled_out(signature)  # type: ignore[attr-defined]
    return cast(Analysis[P, R_co], called)


def _spelled_out(signature: inspect.Signature) -> inspect.Signature:
    """The signature with the fields of `Execution` before `execution` itself."""
    kept = [p for p in signature.parameters.values() if p.name != "execution"]
    own = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for field in fields(Execution)
    ]
    return signature.replace(parameters=[*kept, *own, signature.parameters["execution"]])


def _opened(value: Any, seen: dict[str, str]) -> Any:
    """The store at a path; of a sequence, each. seen: label -> path, of those opened so far."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_opened(part, seen) for part in value)
    if not isinstance(value, (str, os.PathLike, Url)):
        return value
    from vitsee_stores import open_store

    store = open_store(value)
    other = seen.setdefault(store.label, str(value))
    if other != str(value):
        raise VitseeError(
            f"two stores are called {store.label!r}: {other} and {value}; "
            "give open_store(path, label=...) for one of them"
        )
    return store
