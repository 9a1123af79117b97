"""Models on torch's meta device: what is imported before."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType

import pytest
import torch

from vitsee_core.models.sources.meta_device import meta_device


class Importing:
    """Finds timm anew and notes on which device a tensor is made meanwhile."""

    def __init__(self) -> None:
        self.devices: list[str] = []
        self.module = sys.modules["timm"]

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "timm":
            return None
        self.devices.append(torch.empty(1).device.type)
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        pass


def test_timm_is_imported_before_tensors_lose_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first import computes with tensors (torch 2.6), which has no result on the device."""
    import timm

    finder = Importing()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.setattr(finder.module, "__spec__", finder.module.__spec__)
    monkeypatch.delitem(sys.modules, "timm")
    with meta_device():
        import timm

        assert torch.empty(1).device.type == "meta"
    assert finder.devices == ["cpu"]
    assert timm is finder.module
