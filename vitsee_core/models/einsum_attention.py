"""Attention whose weights and values are multiplied by `torch.einsum`, laid out as a product of
matrices would have it."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Product(NamedTuple):
    """A softmax's argument, and the values and outputs of its product, each with the batch's axes
    in front: (..., queries, keys), (..., keys, dim) and (..., queries, dim)."""

    scores: Tensor
    value: Tensor
    output: Tensor


def read_einsum(
    arguments: Sequence[Any],
    scores: Tensor,
    *,
    weights_at: int,
    turned: bool,
    softmax_axis: int,
    result: Tensor,
) -> Product | None:
    """The product of weights and values that an einsum computes; None where it is another one.

    Args:
        arguments: equation and operands, as torch hands them to who watches.
        scores: what the softmax got.
        weights_at: which operand the weights are.
        turned: whether the last two axes of the scores are exchanged there.
        softmax_axis: the axis of the scores that the softmax is over, from the end.
        result: of the einsum.
    """
    equation = arguments[0]
    operands = _operands(arguments[1:])
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    spelled = _spelled(equation, operands)
    if spelled is None:
        return None
    terms, output_axes = spelled
    weight_axes = terms[weights_at]
    value_axes = terms[1 - weights_at]
    if turned:
        weight_axes = weight_axes[:-2] + weight_axes[-1] + weight_axes[-2]
    if any(
        len(set(axes)) != len(axes) for axes in (weight_axes, value_axes, output_axes)
    ):
        return None
    key = weight_axes[softmax_axis]
    others = weight_axes.replace(key, "")
    own_axes = [axis for axis in value_axes if axis not in weight_axes]
    # Values that heads share have no axis of heads: then the query's is the last but the keys'.
    query = next((letter for letter in others[::-1] if letter not in value_axes), None)
    if query is None or len(own_axes) != 1 or key not in value_axes:
        return None
    batch = others.replace(query, "")
    dim = own_axes[0]
    if sorted(output_axes) != sorted(batch + query + dim):
        return None
    value_axes_there = [axis for axis in batch + key + dim if axis in value_axes]
    value = operands[1 - weights_at].permute(
        [value_axes.index(axis) for axis in value_axes_there]
    )
    for place, axis in enumerate(batch):
        if axis not in value_axes:
            value = value.unsqueeze(place)
    sizes = [scores.shape[weight_axes.index(axis)] for axis in batch]
    return Product(
        scores=scores.permute([weight_axes.index(axis) for axis in batch + query + key]),
        value=value.expand(*sizes, *value.shape[-2:]),
        output=result.permute([output_axes.index(axis) for axis in batch + query + dim]),
    )


def _operands(arguments: Sequence[Any]) -> Sequence[Tensor]:
    if len(arguments) == 1 and isinstance(arguments[0], list | tuple):
        return arguments[0]
    return arguments


def _spelled(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str] | None:
    """A letter for every axis of the operands and of the result, `...` spelled out; None for an
    equation that does not fit the operands."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return None
    free = [letter for letter in string.ascii_letters if letter not in equation]
    dots = 0
    for term, operand in zip(terms, operands, strict=True):
        n_dots = operand.ndim - len(term.replace("...", ""))
        if n_dots < 0 or (n_dots > 0 and "..." not in term):
            return None
        dots = max(dots, n_dots)
    letters = "".join(free[:dots])
    spelled = []
    for term, operand in zip(terms, operands, strict=True):
        n_dots = operand.ndim - len(term.replace("...", ""))
        # Of several ellipses the last axes are the same.
        spelled.append(term.replace("...", letters[dots - n_dots :]))
    if not arrow:
        named = left.replace("...", "").replace(",", "")
        once = sorted(letter for letter in set(named) if named.count(letter) == 1)
        return spelled, letters + "".join(once)
    return spelled, right.replace("...", letters)
