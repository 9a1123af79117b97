"""Code of others that loads weights into its own modules, watched: what it leaves random.

A file or a library calls `module.load_state_dict(...)` while it makes its model. With strict=False
torch leaves what it does not find as it was, and says so to nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from vitsee_core.models.weights.fitting import (
    classifier_names,
    require_fit,
    require_numbers,
)

EXPECTED = (
    "expected code that loads all but the classifier: give it the weights by the model's own names "
    "(random weights are --random-init SEED)"
)


@dataclass
class Loads:
    """The parameters that calls of `load_state_dict` left as they were.

    Attributes:
        left: (parameter, copy of its values at the call) of those that the weights lacked.
        left_over: names of the weights without use.
    """

    left: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)

    def require_all(self, module: nn.Module, who: str) -> None:
        """Refuse a module with parameters that a call left random, and that nothing has changed
        since; the classifier's may be random.

        Args:
            module: the module that the code made.
            who: the file or library, as the message calls it.

        Raises:
            ModelError: names them.
        """
        unchanged = {
            id(parameter)
            for parameter, before in self.left
            if not parameter.is_meta and torch.equal(parameter.detach(), before)
        }
        heads = classifier_names(module)
        random = [
            name
            for name, parameter in module.named_parameters()
            if id(parameter) in unchanged and not name.startswith(heads)
        ]
        require_fit(
            who,
            missing=random,
            # Names without use matter only where something is missing: it may be one of them.
            left_over=self.left_over if random else (),
            expected=EXPECTED,
        )


@contextmanager
def watched_loads(who: str) -> Iterator[Loads]:
    """Return a context in which calls of `load_state_dict` are remembered, and quantised or complex
    weights for floats refused.

    who: the file or library, as messages call it.

    Raises:
        ModelError: within: such weights.
    """
    loads = Loads()
    original: Any = nn.Module.load_state_dict

    def load(
        module: nn.Module, state: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        targets = dict(module.state_dict())
        stored = {
            name: x
            for name, x in state.items()
            if name in targets and isinstance(x, Tensor)
        }
        require_numbers(who, stored, targets)
        result = original(module, state, *args, **kwargs)
        parameters = dict(module.named_parameters())
        for name in result.missing_keys:
            if name in parameters:
                loads.left.append((parameters[name], parameters[name].detach().clone()))
        loads.left_over += result.unexpected_keys
        return result

    with mock.patch.object(nn.Module, "load_state_dict", load):
        yield loads
