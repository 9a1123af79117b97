"""What a notebook gives an analysis: paths where stores are taken, one name where several are."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores import Store

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Analysis(Protocol[P, R_co]):
    """An analysis that also takes paths of stores."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *stores: Store | str | os.PathLike[str], **kwargs: Any) -> R_co: ...


def takes_paths(run: Callable[P, R_co]) -> Analysis[P, R_co]:
    """Decorator of an analysis' `run`: a path stands for the store there, and a text for a
    sequence of that one text (`sites="blocks.0.out"`).

    Which parameters these are their annotations say: `Store`, `Sequence[Store]`, `Sequence[str]`.

    Raises, when called:
        StoreError: as `open_store`.
        VitseeError: two of the stores have one label.
    """
    parameters = inspect.signature(run).parameters

    @wraps(run)
    def called(*args: Any, **kwargs: Any) -> R_co:
        bound = inspect.signature(run).bind(*args, **kwargs)
        seen: dict[str, str] = {}
        for name, value in bound.arguments.items():
            kind = str(parameters[name].annotation)
            if "Store" in kind:
                bound.arguments[name] = _opened(value, seen)
            elif kind.startswith("Sequence[str]") and isinstance(value, str):
                bound.arguments[name] = (value,)
        return run(*bound.args, **bound.kwargs)

    return cast(Analysis[P, R_co], called)


def _opened(value: Any, seen: dict[str, str]) -> Any:
    """The store at a path; of a sequence, each. seen: label -> path, of those opened so far."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_opened(part, seen) for part in value)
    if not isinstance(value, (str, os.PathLike)):
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
