"""The choice of one network among several that a builder returns: an encoder and its predictor as a
tuple (hub entries of V-JEPA 2), in a dict, a dataclass or an nn.ModuleDict; or of a module in one,
by its path."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from vitsee_core.models.hook_points import ModelError, some


class Built(NamedTuple):
    """The values that a builder returned.

    Attributes:
        networks: index or name -> network.
        others: the values beside them, in their order.
        single: whether the builder returned one network alone; its name is then "".
    """

    networks: dict[str, Any]
    others: list[Any]
    single: bool


class Chosen(NamedTuple):
    """A network of those that a builder returned.

    Attributes:
        network: the network.
        remark: note on which of several it is, None where it is the only one.
    """

    network: nn.Module
    remark: str | None


def is_network(value: object) -> bool:
    """Return whether a value is a module with parameters: transforms may be modules without any."""
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None


def sort_out(value: Any) -> Built:
    """Return the networks of a builder's value.

    value: a network; (network, transform, class names) or the first of them; or a tuple, list,
    mapping or dataclass of networks, which may stand in the place of the network.
    """
    if _is_single(value):
        return Built({"": value}, [], single=True)
    entries = _entries(value)
    networks = {name: entry for name, entry in entries.items() if is_network(entry)}
    is_plain_tuple = isinstance(value, tuple) and not hasattr(value, "_fields")
    if not is_plain_tuple:
        # In a collection with names other entries may be about anything.
        others = []
        if "transform" in entries:
            others.append(entries["transform"])
        if "class_names" in entries:
            others.append(entries["class_names"])
        return Built(networks, others, single=False)
    first: Any = value[0] if value else None
    if list(networks) == ["0"] and _is_single(first):  # (network, transform, ...)
        return Built({"": first}, list(value[1:]), single=True)
    if len(networks) < 2 and not _is_single(first):  # (networks, transform, ...)
        return Built(sort_out(first).networks, list(value[1:]), single=False)
    others = [entry for entry in value if not is_network(entry)]
    return Built(networks, others, single=False)


def _is_single(value: object) -> bool:
    """Return whether a value is not a collection, of which a network has to be chosen."""
    return not isinstance(value, nn.ModuleList | nn.ModuleDict) and not _entries(value)


def choose(built: Built, network_name: str, name: str) -> Chosen:
    """Return the network that a name means.

    Args:
        built: the builder's values.
        network_name: index or name of one of several networks, with the path of a module in it
            behind a dot; in a single network a path alone; "" for the only network.
        name: the model, as messages call it.

    Raises:
        ModelError: there are several and none is named, or none has that name.
    """
    if built.single:
        (network,) = built.networks.values()
        return Chosen(_submodule(network, network_name, name), None)
    listed = [f"{key} ({type(x).__name__})" for key, x in built.networks.items()]
    if not network_name and len(built.networks) == 1:
        return Chosen(next(iter(built.networks.values())), None)
    key, _, path = network_name.partition(".")
    if key not in built.networks:
        unknown = f", and none is {key!r}" if network_name else ""
        example = next(iter(built.networks))
        raise ModelError(
            f"{name} gives {len(listed)} networks{unknown}: {some(listed)}; name one of "
            f"them, as in {name.partition('#')[0]}#{example}"
        )
    rest = []
    for network_key, text in zip(built.networks, listed, strict=True):
        if network_key != key:
            rest.append(text)
    remark = None
    if rest:
        remark = f"is {key} of what its function gives; beside it: {some(rest)}"
    return Chosen(_submodule(built.networks[key], path, name), remark)


def _submodule(network: nn.Module, path: str, name: str) -> nn.Module:
    """Return the module at a path, the network itself at "".

    Raises:
        ModelError: there is none; names the network's children.
    """
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
    """Return the entries of a collection by name or index; {} for anything else."""
    if isinstance(value, Mapping | nn.ModuleDict):
        return {str(key): entry for key, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names}
    if isinstance(value, tuple | list | nn.ModuleList):
        fields: Sequence[object] = getattr(value, "_fields", None) or range(len(value))
        return {str(name): entry for name, entry in zip(fields, value, strict=True)}
    return {}
