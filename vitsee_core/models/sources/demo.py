"""The models that ship with vitsee: `demo:vit`, `demo:resnet` and so on."""

from __future__ import annotations

from vitsee_core.models.sources.timm import TimmSource
from vitsee_core.models.sources.timm_create import FOLDER


class DemoSource(TimmSource):
    """A folder of the demo, as timm reads it."""

    @property
    def full(self) -> str:
        """timm's name of the folder, whose architecture may be the demo's own."""
        from vitsee_core.demo import architectures, model_folder

        folder = model_folder(self.name.removeprefix("demo:"))
        architectures.register()
        return f"{FOLDER}{folder}"


SOURCE = DemoSource
