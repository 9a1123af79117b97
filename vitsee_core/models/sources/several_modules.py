"""One network of the several that a builder gives: an encoder and its predictor as a tuple (hub
entries of V-JEPA 2), in a dict, a dataclass or an nn.ModuleDict; or a part of one, by its path."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from vitsee_core.models.hook_points import ModelError, some


class Given(NamedTuple):
    """What a builder gives: networks by index or name, what else came with them in its order, and
    whether it gave one network alone."""

    networks: dict[str, Any]
    others: list[Any]
    single: bool


class Chosen(NamedTuple):
    """A network, and a remark on which of several it is, None where there is one alone."""

    network: nn.Module
    remark: str | None


def is_network(value: object) -> bool:
    """Whether a value is a module with parameters: transforms may be modules without any."""
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None


def sort_out(value: Any) -> Given:
    """Return the networks of what a builder gives: itself, the first of (module, transform, class
    names), or those in a tuple, list, mapping or dataclass, which may stand in the place of the
    module."""
    if _is_single(value):
        return Given({"": value}, [], single=True)
    entries = _entries(value)
    networks = {name: entry for name, entry in entries.items() if is_network(entry)}
    if not _is_plain_tuple(value):
        # Of a collection with names only these two are known to be about the images and the answer.
        others = [
            entries[name] for name in ("transform", "class_names") if name in entries
        ]
        return Given(networks, others, single=False)
    first: Any = value[0] if value else None
    others = list(value[1:])
    if list(networks) == ["0"] and _is_single(first):
        return Given({"": first}, others, single=True)
    if len(networks) < 2 and not _is_single(first):
        return Given(sort_out(first).networks, others, single=False)
    return Given(
        networks, [entry for entry in value if not is_network(entry)], single=False
    )


def _is_single(value: object) -> bool:
    """Whether a value is no collection of modules, for which one has to be chosen."""
    return not isinstance(value, nn.ModuleList | nn.ModuleDict) and not _entries(value)


def _is_plain_tuple(value: object) -> bool:
    return isinstance(value, tuple) and not hasattr(value, "_fields")


def choose(given: Given, part: str, name: str) -> Chosen:
    """Return the network that `part` names, the index or name of one of several or the path of a
    module in a single one; without a part the only network.

    Raises:
        ModelError: there are several and no part was named, or none of that name.
    """
    if given.single:
        (network,) = given.networks.values()
        return Chosen(_below(network, part, name), None)
    listed = [f"{key} ({type(x).__name__})" for key, x in given.networks.items()]
    if not part and len(given.networks) == 1:
        return Chosen(next(iter(given.networks.values())), None)
    key, _, path = part.partition(".")
    if key not in given.networks:
        asked = f", and none is {key!r}" if part else ""
        example = next(iter(given.networks))
        raise ModelError(
            f"{name} gives {len(listed)} networks{asked}: {some(listed)}; name one of them, as in "
            f"{name.partition('#')[0]}#{example}"
        )
    others = [
        text for other, text in zip(given.networks, listed, strict=True) if other != key
    ]
    remark = (
        f"is {key} of what its function gives; beside it: {some(others)}"
        if others
        else None
    )
    return Chosen(_below(given.networks[key], path, name), remark)


def _below(network: nn.Module, path: str, name: str) -> nn.Module:
    """The module at a path."""
    if not path or not isinstance(network, nn.Module):
        return network
    try:
        return network.get_submodule(path)
    except AttributeError as error:
        children = [child for child, _ in network.named_children()]
        raise ModelError(
            f"{name}: {type(network).__name__} has no module {path!r}; it has: "
            f"{some(children) or 'none'}"
        ) from error


def _entries(value: Any) -> dict[str, Any]:
    """The entries of a collection by name or index; {} of anything else."""
    if isinstance(value, Mapping | nn.ModuleDict):
        return {str(key): entry for key, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names}
    if isinstance(value, tuple | list | nn.ModuleList):
        fields: Sequence[object] = getattr(value, "_fields", None) or range(len(value))
        return {str(name): entry for name, entry in zip(fields, value, strict=True)}
    return {}
