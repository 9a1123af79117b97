"""Convenience arguments of analyses: paths for stores, one name for several, the fields of
`Execution` as keywords."""

from __future__ import annotations

import difflib
import inspect
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

from vitsee_core.runtime import registry
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import Fields, Gather, Option
from vitsee_core.runtime.parameters import (
    DeclarationError,
    DeclaredParameter,
    keywords_of,
    parameters_of,
)
from vitsee_core.runtime.progress import OfClips
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.plan import CLIPS
from vitsee_stores.url import Url

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitsee_stores import Store

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


FIELDS = tuple(field.name for field in fields(Execution))


class Analysis(Protocol[P, R_co]):
    """An analysis that also accepts paths of stores, and the fields of `Execution` as keywords."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(
        self, *stores: Store | str | os.PathLike[str] | Url | NDArray[Any], **kwargs: Any
    ) -> R_co: ...


def analysis(run: Callable[P, R_co]) -> Analysis[P, R_co]:
    """Decorator of an analysis' `run`: accepts a path for a store, one text for a sequence of texts
    (`sites="blocks.0.out"`), and keywords like `images=1000` for the fields of the parameter
    `execution`, if there is one.

    Parameters annotated `Store`, `Sequence[Store]` or `Sequence[str]` are converted. The signature
    that `help` shows lists the fields of `Execution` by name; parameters with an `Option` are
    documented by it, in the docstring's Args.

    Raises, when called:
        StoreError: as `open_store`.
        VitseeError: two stores share a label, or one holds clips and the analysis is of images.
        TypeError: an unknown keyword; names it and the closest match.
    """
    signature = inspect.signature(run)
    parameters = parameters_of(run)
    keywords = keywords_of(run)
    framed = "execution" in parameters
    takes_stores = {name: keyword.takes_stores for name, keyword in keywords.items()}
    takes_texts = {
        name: keyword.is_sequence and keyword.types == (str,)
        for name, keyword in keywords.items()
    }

    @wraps(run)
    def called(*args: Any, **kwargs: Any) -> R_co:
        if any(hasattr(value, "__array__") for value in args):
            return cast(R_co, _of_arrays(run, args, kwargs))
        own = {name: kwargs.pop(name) for name in FIELDS if framed and name in kwargs}
        if own:
            kwargs["execution"] = replace(kwargs.get("execution", DEFAULT), **own)
        if unknown := [name for name in kwargs if name not in keywords]:
            known = [*keywords, *(FIELDS if framed else ())]
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = (
                f"; did you mean {near[0]}?" if near else f"; it takes {', '.join(known)}"
            )
            name = registry.name_of(run.__module__)
            raise TypeError(f"{name}() has no keyword {unknown[0]!r}{hint}")
        for name, value in kwargs.items():
            if takes_texts[name] and isinstance(value, str):
                kwargs[name] = (value,)
        _gather_fields(parameters, kwargs)
        bound = signature.bind(*args, **kwargs)
        seen: dict[str, str] = {}
        of_clips = False
        for name, value in bound.arguments.items():
            if takes_stores.get(name):
                bound.arguments[name] = opened = _opened(value, seen)
                of_clips = _hold_clips(run.__module__, opened) or of_clips
            elif takes_texts.get(name) and isinstance(value, str):
                bound.arguments[name] = (value,)
        if framed and (guest := registry.guest_of(run.__module__)) is not None:
            # Workers have to have its code.
            needed = getattr(
                bound.arguments.get("execution", DEFAULT).map, "modules", set[str]()
            )
            needed.add(guest.module)
        if of_clips and framed:
            execution = bound.arguments.get("execution", DEFAULT)
            progress = OfClips(to=execution.progress)
            bound.arguments["execution"] = replace(execution, progress=progress)
        elif of_clips and "progress" in bound.arguments:
            bound.arguments["progress"] = OfClips(to=bound.arguments["progress"])
        with registry.blamed(run.__module__):
            try:
                result: Any = run(*bound.args, **bound.kwargs)
            except DeclarationError as error:  # of a table that it makes
                raise DeclarationError(f"{run.__module__}: run: {error}") from error
        if (declaration := registry.declaration_of(run.__module__)) is not None:
            declaration.check_table(result)
        if hasattr(result, "made_by"):
            bound.apply_defaults()
            name = registry.name_of(run.__module__)
            notes = {**result.notes, "examples": CLIPS} if of_clips else result.notes
            given = _without_groups(parameters, bound.arguments)
            result = replace(result, notes=notes, made_by=(name, given))
        return cast(R_co, result)

    shown = signature.replace(
        parameters=[
            inspect.Parameter(
                keyword.name,
                keyword.kind,
                default=keyword.default,
                annotation=keyword.text,
            )
            for keyword in keywords.values()
        ]
    )
    called.__signature__ = _spelled_out(shown) if framed else shown  # type: ignore[attr-defined]
    called.__doc__ = documented(run.__doc__ or "", keywords)
    return cast(Analysis[P, R_co], called)


def _gather_fields(
    parameters: dict[str, DeclaredParameter], kwargs: dict[str, Any]
) -> None:
    """Put the keywords that are fields of a `Fields` into its dataclass."""
    for name, parameter in parameters.items():
        if isinstance(parameter.about, Fields):
            field_names = parameters_of(parameter.annotation).keys() & kwargs.keys()
            values = {field_name: kwargs.pop(field_name) for field_name in field_names}
            kwargs[name] = parameter.annotation(**values)


def _without_groups(
    parameters: dict[str, DeclaredParameter], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments by the names that callers give: the fields of each `Fields`."""
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(parameters[name].about, Fields):
            given |= vars(value)
        else:
            given[name] = value
    return given


def _of_arrays(
    run: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]
) -> Any:
    """The result of an analysis' function `of_arrays`, for arrays in place of stores. Raises
    TypeError: it has none, arrays beside stores, not as many as it takes, or options."""
    name = registry.name_of(run.__module__)
    of_arrays = getattr(registry.declaration_of(run.__module__), "of_arrays", None)
    if of_arrays is None:
        raise TypeError(f"{name}() takes stores or their paths, no arrays")
    n = len(inspect.signature(of_arrays).parameters)
    if (
        len(args) != n
        or options
        or not all(hasattr(value, "__array__") for value in args)
    ):
        raise TypeError(
            f"{name}() of arrays takes {n} of them and nothing else; its options belong to stores"
        )
    return of_arrays(*args)


def documented(text: str, parameters: dict[str, DeclaredParameter]) -> str:
    """A docstring with Args entries for `execution` and for all parameters with options."""
    entries = []
    for own in parameters.values():
        if isinstance(own.about, Option) and own.about.help:
            entries.append(_entry(own, own.about))
        elif isinstance(own.about, Gather) and f"    {own.name}: " not in text:
            entries.append(f"    {own.name}: a `{own.about.kind.__name__}`.")
    if "execution" in parameters and "    execution: " not in text:
        entries.append(
            "    execution: which images, and what the work may use; see `Execution`, whose fields "
            "are\n        keywords too."
        )
    blocks = inspect.cleandoc(text).split("\n\n")
    at = next((i for i, block in enumerate(blocks) if block.startswith("Args:")), None)
    if at is None and entries:
        ends = (i for i, block in enumerate(blocks) if block.startswith("Raises:"))
        at = next(ends, len(blocks))
        blocks.insert(at, "Args:")
    if at is not None:
        blocks[at] = "\n".join([blocks[at], *entries])
    return "\n\n".join(blocks)


def _entry(own: DeclaredParameter, option: Option) -> str:
    """The Args lines for one parameter."""
    text = option.help.partition(" Repeatable")[0]
    if option.choices:
        some = "some" if own.is_sequence else "one"
        text = f"{some} of {', '.join(option.choices)}. {text}"
    if option.default is not None:
        text += f" Default: {option.default}."
    return textwrap.fill(
        " ".join(f"{own.name}: {text}".split()),
        width=96,
        initial_indent="    ",
        subsequent_indent="        ",
        break_on_hyphens=False,
    )


def _spelled_out(signature: inspect.Signature) -> inspect.Signature:
    """The signature with the fields of `Execution` before `execution` itself."""
    kept = [p for p in signature.parameters.values() if p.name != "execution"]
    own = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=field.type,
        )
        for field in fields(Execution)
    ]
    return signature.replace(parameters=[*kept, *own, signature.parameters["execution"]])


def _hold_clips(module: str, stores: Any) -> bool:
    """Whether any of the stores holds clips. Raises MissingInput: one does, and the analysis needs
    still images."""
    declaration = registry.declaration_of(module)
    still = declaration is not None and "images" in (declaration.needs or ())
    found = False
    for store in stores if isinstance(stores, Sequence) else [stores]:
        plan = getattr(store, "plan", None)
        if plan is None or plan.clip is None:
            continue
        found = True
        if still:
            command = registry.name_of(module).replace("_", "-")
            raise MissingInput(
                f"{command} is of images, and {store.label} holds clips of {plan.clip.frames} "
                "frames; expected a store of the frames, extracted as images"
            )
    return found


def _opened(value: Any, seen: dict[str, str]) -> Any:
    """The store at a path; for a sequence, each. seen: label -> path, of the stores opened so
    far."""
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
