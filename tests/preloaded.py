"""Everything that takes seconds to import, imported: for processes that others are forked from."""

from __future__ import annotations

import importlib

from vitsee_core.kernels.compiled import compiled

NAMES = (
    "PIL.PngImagePlugin",
    "distributed",
    "matplotlib.backends.backend_agg",
    "numba",
    "rich.progress",
    "scipy.linalg",
    "timm",
    "vitsee_core.analyses.cka",
    "vitsee_cli.commands.extract",
    "vitsee_cli.commands.study",
    "vitsee_core.runtime.dask_map",
    "vitsee_core.extraction.by_workers",
    "vitsee_core.pages.report.page",
    "vitsee_core.similarity.estimators",
    "zarr",
)


def preload() -> None:
    """Import `NAMES`, and what numba compiles with."""
    for name in NAMES:
        importlib.import_module(name)
    nothing()


@compiled
def nothing() -> int:
    """Compiled, it makes numba load what it compiles with."""
    return 0


preload()
