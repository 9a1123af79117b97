"""Promises about names and options, and how a change of them is announced.

docs/guide/stability.md is the policy. A name that is to go stays for one minor version, marked with
`deprecated`; what is young enough to change without that notice is marked with `experimental`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

EXPERIMENTAL = "Experimental."


def experimental(help_text: str) -> str:
    """Return the help of an option or command with the mark that excludes it from promises.

    Example:
        >>> experimental("Take N frames of each clip.  [default: 8]")
        'Experimental. Take N frames of each clip.  [default: 8]'
    """
    return f"{EXPERIMENTAL} {help_text}"


def deprecated(
    *, since: str, removed_in: str, instead: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a public function that is going to be removed.

    A call still works, and warns once per calling line with a `FutureWarning`, which Python shows
    by default (a `DeprecationWarning` is hidden outside of `__main__` and of tests). The docstring
    gets the same sentence.

    Args:
        since: the version that first warns, as `0.2`.
        removed_in: the version that no longer has it; at least one minor version later.
        instead: how the same is written now, as `vitsee.attn_dist(..., metrics=("entropy",))`.

    Example:
        >>> @deprecated(since="0.2", removed_in="0.4", instead="new_name()")
        ... def old_name():
        ...     return 3
        >>> print(old_name.__doc__)
        Deprecated since 0.2: old_name will be removed in 0.4; use new_name().
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with the warning, and with the notice before its docstring."""
        notice = f"{function.__name__} will be removed in {removed_in}; use {instead}"

        @wraps(function)
        def warn_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
            """Warn, and call the function."""
            # stacklevel 2: the warning names the caller's line, not this one.
            warnings.warn(
                f"{notice} (deprecated since {since})", FutureWarning, stacklevel=2
            )
            return function(*args, **kwargs)

        docstring = f"Deprecated since {since}: {notice}."
        if function.__doc__:
            docstring += f"\n\n{function.__doc__}"
        warn_and_call.__doc__ = docstring
        return warn_and_call

    return decorate
