"""vitsee in Python: stores, extraction, and every analysis under its command's name with `_`.

    import vitsee

    store = vitsee.extract("demo:vit", "demo:test", "vit.zarr", images=200)
    table = vitsee.attn_dist("vit.zarr")           # a store or its path; options as keywords
    table.to_csv("dist.csv")
    table.plot()                                   # its figure
    vitsee.cka(vitsee.open_store("vit.zarr"), "resnet.zarr", tokens="mean")
    vitsee.cka(one_array, another)                 # features of the same images, without stores
    vitsee.knn("train.zarr", "vit.zarr", progress=vitsee.NotebookProgress())
    vitsee.cluster("vit.zarr", masks=vitsee.Segmentation("instances.json", weights="any"))

`Monitor(model, "photos", "run.zarrs", every=1000)` measures a model while it is trained.
`explore("a.zarr", output="explore.html")` writes the page of `vitsee explore`. `extract` also takes
a torch module of your own with its transform. An analysis is the `run` of its module in
`vitsee_core.analyses`, whose `plot(table)` draws its figure. Names are imported when they are first
used: `import vitsee` itself imports neither torch nor zarr. Analyses of other packages (guests, see
`vitsee_core.runtime.registry`) are here, too; what they are written with is in `vitsee.api`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vitsee_core.runtime import registry

if TYPE_CHECKING:
    from vitsee_core.extraction.keywords import extract as extract
    from vitsee_core.pages.explore import explore as explore
    from vitsee_core.runtime.progress import NotebookProgress as NotebookProgress
    from vitsee_core.tables.results import Table as Table
    from vitsee_core.training.monitor import Monitor as Monitor
    from vitsee_core.truth.masks.segments import Segmentation as Segmentation
    from vitsee_stores import Store as Store
    from vitsee_stores import VitseeError as VitseeError
    from vitsee_stores import open_store as open_store

_MODULE_OF_NAME = {
    "Monitor": "vitsee_core.training.monitor",
    "NotebookProgress": "vitsee_core.runtime.progress",
    "Segmentation": "vitsee_core.truth.masks.segments",
    "Store": "vitsee_stores",
    "Table": "vitsee_core.tables.results",
    "VitseeError": "vitsee_stores",
    "explore": "vitsee_core.pages.explore",
    "extract": "vitsee_core.extraction.keywords",
    "open_store": "vitsee_stores",
}


def __getattr__(name: str) -> Any:
    """Import a name, or the `run` of an analysis, when it is first used.

    Importing all of them at once would take seconds, and torch.
    """
    if name in _MODULE_OF_NAME:
        value = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    elif not name.startswith("_") and (
        name in registry.builtin_names() or name in registry.names()
    ):
        value = registry.load(name).run
    else:
        raise AttributeError(f"module 'vitsee' has no attribute {name!r}")
    globals()[name] = value  # from now on this function is not called for the name
    return value


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF_NAME, *registry.names()])
