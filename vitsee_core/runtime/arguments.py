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


EXECUTION_FIELDS = tuple(field.name for field in fields(Execution))


class Analysis(Protocol[P, R_co]):
    """An analysis that also accepts paths of stores, and the fields of `Execution` as keywords."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(
        self, *stores: Store | str | os.PathLike[str] | Url | NDArray[Any], **kwargs: Any
    ) -> R_co: ...


def analysis(run: Callable[P, R_co]) -> Analysis[P, R_co]:
    """Return `run` of an analysis with conveniences for callers in Python.

    It then accepts a path for a store, one text for a sequence of texts (`sites="blocks.0.out"`),
    and keywords like `images=1000` for the fields of the parameter `execution`, if there is one.
    Parameters annotated `Store`, `Sequence[Store]` or `Sequence[str]` are converted. The signature
    that `help` shows lists the fields of `Execution` by name; parameters with an `Option` are
    documented by it, in the docstring's Args.

    Raises, when called:
        StoreError: a store cannot be opened.
        VitseeError: two stores share a label, or one holds clips and the analysis is of images.
        TypeError: an unknown keyword; names it and the closest match.
    """
    signature = inspect.signature(run)
    parameters = parameters_of(run)
    keywords = keywords_of(run)
    has_execution = "execution" in parameters
    takes_stores = {name: keyword.takes_stores for name, keyword in keywords.items()}
    takes_texts = {
        name: keyword.is_sequence and keyword.types == (str,)
        for name, keyword in keywords.items()
    }

    @wraps(run)
    def run_with_conveniences(*args: Any, **kwargs: Any) -> R_co:
        """Convert the arguments, call `run`, and note in its result how that was made."""
        # Arrays in place of stores, as a notebook has them.
        if any(hasattr(value, "__array__") for value in args):
            return cast(R_co, _run_on_arrays(run, args, kwargs))
        _refuse_unknown_keywords(run, kwargs, keywords, has_execution)
        for name, value in kwargs.items():
            if takes_texts.get(name) and isinstance(value, str):
                kwargs[name] = (value,)
        _gather_fields(parameters, kwargs)
        bound = signature.bind(*args, **kwargs)
        path_of_label: dict[str, str] = {}
        has_clips = False
        every_store: list[Store] = []
        for name, value in bound.arguments.items():
            if takes_stores.get(name):
                stores = _open_paths(value, path_of_label)
                every_store += _opened(stores)
                bound.arguments[name] = stores
                has_clips = _hold_clips(run.__module__, stores) or has_clips
            elif takes_texts.get(name) and isinstance(value, str):
                bound.arguments[name] = (value,)
        guest = registry.guest_of(run.__module__)
        if has_execution and guest is not None:
            # A `DaskMap` has the set `modules`: its workers need the guest's code, too.
            map_of_workers = bound.arguments.get("execution", DEFAULT).map
            worker_modules: set[str] = getattr(map_of_workers, "modules", set())
            worker_modules.add(guest.module)
        # Progress is announced by the fold, which knows images alone.
        if has_clips and has_execution:
            execution = bound.arguments.get("execution", DEFAULT)
            progress = OfClips(to=execution.progress)
            bound.arguments["execution"] = replace(execution, progress=progress)
        elif has_clips and "progress" in bound.arguments:
            bound.arguments["progress"] = OfClips(to=bound.arguments["progress"])
        with registry.blamed(run.__module__):
            try:
                result: Any = run(*bound.args, **bound.kwargs)
            except DeclarationError as error:  # in a table that `run` makes
                raise DeclarationError(f"{run.__module__}: run: {error}") from error
        declaration = registry.declaration_of(run.__module__)
        if declaration is not None:
            declaration.check_table(result)
        # A table knows how to make itself again; defaults may change between versions.
        if hasattr(result, "made_by"):
            bound.apply_defaults()
            name = registry.name_of(run.__module__)
            notes = {**result.notes, "examples": CLIPS} if has_clips else result.notes
            arguments = _arguments_by_keyword(parameters, bound.arguments)
            result = replace(result, notes=notes, made_by=(name, arguments))
            result = result.with_distinct_weights(every_store)
        return cast(R_co, result)

    help_signature = _help_signature(signature, keywords)
    run_with_conveniences.__signature__ = help_signature  # type: ignore[attr-defined]
    run_with_conveniences.__doc__ = documented(run.__doc__ or "", keywords)
    return cast(Analysis[P, R_co], run_with_conveniences)


def _refuse_unknown_keywords(
    run: Callable[..., Any],
    kwargs: Mapping[str, Any],
    keywords: Mapping[str, DeclaredParameter],
    has_execution: bool,
) -> None:
    """Refuse keywords that the analysis does not have.

    Args:
        run: of the analysis.
        kwargs: the keywords of a call.
        keywords: those that the analysis has.
        has_execution: whether the fields of `Execution` are keywords, too.

    Raises:
        TypeError: names the first unknown keyword, and the closest known one.
    """
    accepted = [*keywords]
    if has_execution:
        accepted += EXECUTION_FIELDS
    unknown = [name for name in kwargs if name not in accepted]
    if not unknown:
        return
    matches = difflib.get_close_matches(unknown[0], accepted, n=1)
    hint = f"it takes {', '.join(accepted)}"
    if matches:
        hint = f"did you mean {matches[0]}?"
    name = registry.name_of(run.__module__)
    raise TypeError(f"{name}() has no keyword {unknown[0]!r}; {hint}")


def _gather_fields(
    parameters: dict[str, DeclaredParameter], kwargs: dict[str, Any]
) -> None:
    """Replace, in `kwargs`, the fields of `execution` and of each parameter with `Fields` by their
    dataclass."""
    if "execution" in parameters:
        changes = {name: kwargs.pop(name) for name in EXECUTION_FIELDS if name in kwargs}
        if changes:
            # A caller may give both: the fields change the execution.
            execution = kwargs.get("execution", DEFAULT)
            kwargs["execution"] = replace(execution, **changes)
    for name, parameter in parameters.items():
        if isinstance(parameter.metadata, Fields):
            field_names = parameters_of(parameter.annotation).keys() & kwargs.keys()
            values = {field_name: kwargs.pop(field_name) for field_name in field_names}
            kwargs[name] = parameter.annotation(**values)


def _arguments_by_keyword(
    parameters: dict[str, DeclaredParameter], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments by the keywords of callers: the inverse of `_gather_fields`."""
    by_keyword: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(parameters[name].metadata, Fields):
            by_keyword |= vars(value)
        else:
            by_keyword[name] = value
    return by_keyword


def _run_on_arrays(
    run: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Return the result of the declaration's function `of_arrays`, for arrays in place of stores.

    Args:
        run: of the analysis.
        args: the positional arguments.
        options: the keywords; none may be given.

    Raises:
        TypeError: the analysis has no such function, or another number of arrays, a store beside
            them, or an option is given.
    """
    name = registry.name_of(run.__module__)
    of_arrays = getattr(registry.declaration_of(run.__module__), "of_arrays", None)
    if of_arrays is None:
        raise TypeError(f"{name}() takes stores or their paths, no arrays")
    n_arrays = len(inspect.signature(of_arrays).parameters)
    are_arrays = all(hasattr(value, "__array__") for value in args)
    if len(args) != n_arrays or not are_arrays or options:
        raise TypeError(
            f"{name}() of arrays takes {n_arrays} of them and nothing else; its options "
            "belong to stores"
        )
    return of_arrays(*args)


def documented(text: str, parameters: dict[str, DeclaredParameter]) -> str:
    """Return a docstring with Args entries for `execution` and for all parameters with options.

    An entry of an option is its help, in place of an entry that the docstring has of the same
    parameter: the command line and `help(vitsee.x)` then say the same. Entries are in the order
    of the parameters, in the block `Args:` or in a new one before the block `Raises:`.
    """
    # Blocks of a docstring are paragraphs; the first line of some is a title.
    blocks = inspect.cleandoc(text).split("\n\n")
    titles = [block.partition("\n")[0] for block in blocks]
    args_index = next(
        (i for i, title in enumerate(titles) if title.startswith("Args:")), None
    )
    written = {} if args_index is None else _entries_of(blocks[args_index])
    entries = dict(written)
    for parameter in parameters.values():
        name = parameter.name
        metadata = parameter.metadata
        if isinstance(metadata, Option) and metadata.help:
            entries[name] = _args_lines(parameter, metadata)
        elif isinstance(metadata, Gather) and name not in written:
            entries[name] = f"    {name}: a `{metadata.kind.__name__}`."
    if "execution" in parameters and "execution" not in written:
        entries["execution"] = (
            "    execution: which images, and what the work may use; see `Execution`, "
            "whose fields are\n        keywords too."
        )
    if not entries:
        return "\n\n".join(blocks)
    position = {name: i for i, name in enumerate(parameters)}
    # A parameter with `Fields` is not a keyword of callers: its fields are, and have entries.
    visible = [name for name in entries if name in position or not name.isidentifier()]
    ordered = sorted(visible, key=lambda name: position.get(name, -1))
    args_block = "\n".join(["Args:", *(entries[name] for name in ordered)])
    if args_index is not None:
        blocks[args_index] = args_block
    else:
        later = [
            i
            for i, title in enumerate(titles)
            if title.startswith(("Raises:", "Examples:"))
        ]
        blocks.insert(later[0] if later else len(blocks), args_block)
    return "\n\n".join(blocks)


def _entries_of(args_block: str) -> dict[str, str]:
    """Return parameter -> its lines, of a docstring's block `Args:`."""
    entries: dict[str, str] = {}
    name = ""
    for line in args_block.splitlines()[1:]:
        if line.startswith("     "):  # a line that goes on with the entry above it
            entries[name] += f"\n{line}"
        else:
            name = line.partition(":")[0].strip()
            entries[name] = line
    return entries


def _args_lines(parameter: DeclaredParameter, option: Option) -> str:
    """Return the Args lines for one parameter, wrapped and indented."""
    # Python callers give a sequence where the command line repeats an option.
    text = option.help.partition(" Repeatable")[0]
    if option.choices:
        how_many = "some" if parameter.is_sequence else "one"
        text = f"{how_many} of {', '.join(option.choices)}. {text}"
    if option.default is not None:
        text += f" Default: {option.default}."
    return textwrap.fill(
        " ".join(f"{parameter.name}: {text}".split()),
        width=96,
        initial_indent="    ",
        subsequent_indent="        ",
        break_on_hyphens=False,
    )


def _help_signature(
    signature: inspect.Signature, keywords: Mapping[str, DeclaredParameter]
) -> inspect.Signature:
    """Return the signature that `help` shows: keywords as callers give them, with annotations as a
    reader writes them, and the fields of `Execution` before `execution` itself."""
    parameters = {
        keyword.name: inspect.Parameter(
            keyword.name,
            keyword.kind,
            default=keyword.default,
            annotation=keyword.text,
        )
        for keyword in keywords.values()
    }
    execution = parameters.pop("execution", None)
    if execution is None:
        return signature.replace(parameters=[*parameters.values()])
    execution_fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=field.type,
        )
        for field in fields(Execution)
    ]
    return signature.replace(
        parameters=[*parameters.values(), *execution_fields, execution]
    )


def _opened(value: Any) -> list[Store]:
    """Return the stores in an argument, whose items may be something else (arrays)."""
    values = value if isinstance(value, Sequence) else [value]
    return [item for item in values if hasattr(item, "manifest")]


def _hold_clips(module: str, stores: Any) -> bool:
    """Return whether any of the stores holds clips.

    Raises:
        MissingInput: a store holds clips, and the analysis in `module` needs still images.
    """
    declaration = registry.declaration_of(module)
    needs_images = declaration is not None and "images" in (declaration.needs or ())
    # All stores are looked at: any of them may be refused.
    has_clips = False
    for store in stores if isinstance(stores, Sequence) else [stores]:
        plan = getattr(store, "plan", None)
        if plan is None or plan.clip is None:
            continue
        has_clips = True
        if needs_images:
            command = registry.name_of(module).replace("_", "-")
            raise MissingInput(
                f"{command} is of images, and {store.label} holds clips of "
                f"{plan.clip.frames} frames; expected a store of the frames, extracted "
                "as images"
            )
    return has_clips


def _open_paths(value: Any, path_of_label: dict[str, str]) -> Any:
    """Return the store at a path; the stores at a sequence of paths; anything else unchanged.

    path_of_label: label -> path of the stores opened so far, which is extended.

    Raises:
        VitseeError: two different paths give stores with one label.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_open_paths(item, path_of_label) for item in value)
    if not isinstance(value, (str, os.PathLike, Url)):
        return value
    from vitsee_stores import open_store

    store = open_store(value)
    first_path = path_of_label.setdefault(store.label, str(value))
    if first_path != str(value):
        raise VitseeError(
            f"two stores are called {store.label!r}: {first_path} and {value}; "
            "give open_store(path, label=...) for one of them"
        )
    return store
