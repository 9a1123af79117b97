"""Models that a library knows by a name, and their weights by a tag: `LIBRARY:NAME/TAG`."""

from __future__ import annotations

from abc import abstractmethod
from fnmatch import fnmatchcase

from torch import nn

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.sources.base import Source
from vitsee_core.models.sources.errors import near_names, one_line


class TaggedSource(Source):
    """library: what stands before the colon. what: the kind of its models, in messages. all_names:
    the option of `vitsee models` that lists as many as it has, if it needs one."""

    arguments_in_name = True
    library: str
    what: str
    all_names = ""

    @abstractmethod
    def known(self) -> list[str]:
        """The names of its models."""

    @abstractmethod
    def tags_of(self, model: str) -> list[str]:
        """The tags of one's weights."""

    @property
    def parts(self) -> tuple[str, str]:
        """The model's name, and the tag of its weights or ""."""
        model, _, tag = self.name.removeprefix(f"{self.library}:").partition("/")
        return model, tag

    def check(self) -> None:
        self.tags()

    @property
    def label(self) -> str:
        return self.parts[0]

    def matching(self) -> dict[str, list[str]]:
        found = [name for name in self.known() if fnmatchcase(name, self.parts[0])]
        if not found:
            self.tags()  # which says so
        return {f"{self.library}:{name}": self.tags_of(name) for name in found}

    def architecture(self, module: nn.Module) -> str:
        return f"{self.library}:{self.parts[0]}"

    def tags(self) -> list[str]:
        """The tags of the model's weights; a ModelError for no such model, or none of its tags."""
        model, tag = self.parts
        known = self.known()
        if model not in known:
            raise ModelError(
                f"no {self.what} of {self.library} is called {model!r}{near_names(model, known)} "
                f"(run: vitsee models '{self.library}:*'{self.all_names})"
            )
        tags = self.tags_of(model)
        if tag and tag not in tags:
            has = ", ".join(tags) or "none"
            raise ModelError(f"{model} of {self.library} has no weights {tag!r}; it has: {has}")
        return tags

    def not_fetched(self, error: BaseException) -> ModelError:
        """The line for weights that are neither here nor to be had."""
        return ModelError(
            f"the weights of {self.name} are not on this machine, and cannot be fetched: "
            f"{one_line(error)}; give --checkpoint FILE or --random-init SEED"
        )
