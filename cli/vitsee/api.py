"""Names for analyses in packages of their own, which vitsee runs as its own commands (guests).

A guest imports from here and from `vitsee`, and nothing else of ours: `vitsee_core`, `vitsee_cli`
and `vitsee_stores` may change with any release. Semantic versioning covers what stands here: from
1.0 on only a new major version takes a name away, or makes a function refuse a call that it took;
before that only a new minor one does, and CHANGES.md says so. docs/guide/guests.md says what each
name is for.
"""

from __future__ import annotations

from vitsee_core.declaration import Analysis
from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.panels import legend_below, panels
from vitsee_core.figures.plotting import colour, marker, styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import (
    ATTENTION,
    FLOW,
    KNOWLEDGE,
    SIMILARITY,
    SITES,
    Offers,
    Option,
    blocks_option,
    metrics_option,
    tokens_option,
)
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.statistics.moments import INTERVAL_METHOD, SlabMoments, mean_over_tokens
from vitsee_core.tables.columns import PAIR, SITE, VALUES, pair_columns, site_columns
from vitsee_core.tables.headlines import Answer, by_store, first_and_last
from vitsee_core.tables.results import Table
from vitsee_stores import Slab, Store, open_store
from vitsee_stores.errors import (
    MissingInput,
    NotOffered,
    SiteError,
    StoreError,
    StoreMismatch,
    VitseeError,
)

__all__ = [
    "ATTENTION",
    "DEFAULT",
    "FLOW",
    "INTERVAL_METHOD",
    "KNOWLEDGE",
    "PAIR",
    "SIMILARITY",
    "SITE",
    "SITES",
    "VALUES",
    "Analysis",
    "Answer",
    "Execution",
    "MissingInput",
    "NotOffered",
    "Offers",
    "Option",
    "SiteError",
    "SiteFeatures",
    "Slab",
    "SlabMoments",
    "Store",
    "StoreError",
    "StoreMismatch",
    "Table",
    "VitseeError",
    "analysis",
    "blocks_option",
    "by_store",
    "choose_features",
    "colour",
    "counting",
    "draw_depth_panels",
    "first_and_last",
    "legend_below",
    "marker",
    "mean_over_tokens",
    "metrics_option",
    "open_store",
    "pair_columns",
    "panels",
    "select_each",
    "site_columns",
    "sites_of",
    "styled",
    "tokens_option",
]
