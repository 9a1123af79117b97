"""Architectures of the demo's models that timm has in other sizes only."""

from __future__ import annotations

from typing import Any

MIXER = "demo_mixer"


def register() -> None:
    """Register `MIXER` with timm: its MLP-Mixer (Tolstikhin et al. 2021) of any size.

    timm's own entries of that family fix patch, depth and width.
    """
    import timm
    from timm.models import MlpMixer, build_model_with_cfg, register_model

    # timm warns when a name is registered twice.
    if timm.is_model(MIXER):
        return

    def demo_mixer(pretrained: bool = False, **kwargs: Any) -> Any:
        """Return the model; timm calls it by its name, which is `MIXER`."""
        return build_model_with_cfg(MlpMixer, MIXER, pretrained, **kwargs)

    register_model(demo_mixer)
