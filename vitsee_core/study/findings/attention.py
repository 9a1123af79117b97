"""Findings about attention heads: targets and distances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitsee_core.study.findings import estimates as of
from vitsee_core.study.findings.finding import Finding

if TYPE_CHECKING:
    from vitsee_core.study.findings.model_tables import ModelTables

SECTION = "Attention (Raghu et al. 2021; Dosovitskiy et al. 2021; Walmer et al. 2023)"


def _repetition(f: ModelTables, model: str) -> of.Estimate:
    return of.rise(f.heads(model).filter(metric="query_repetition"))


FINDINGS = (
    Finding(
        "local-heads",
        "The lowest layers have local heads.",
        "Raghu et al. 2021, Sec. 5, Fig. 3; Dosovitskiy et al. 2021, Fig. 7 right",
        "half of uniform attention's distance less the distance of the most local head of the two "
        "lowest blocks",
        "of uniform attention's distance",
        ("vit",),
        lambda f: of.below(0.5, of.nearest_head(f.distances("vit"))),
    ),
    Finding(
        "local-and-global",
        "The lowest layers mix nearer and farther heads more than the highest do.",
        "Raghu et al. 2021, Sec. 5, Fig. 3",
        "farthest less nearest head of the two lowest blocks, less the same of the two highest",
        "of uniform attention's distance",
        ("vit",),
        lambda f: of.head_range(f.distances("vit")),
    ),
    Finding(
        "upper-global",
        "The most local heads are in the lowest layers, not in the highest.",
        "Raghu et al. 2021, Sec. 5, Fig. 3",
        "the most local head of the two highest blocks less that of the two lowest",
        "of uniform attention's distance",
        ("vit",),
        lambda f: of.upper_is_global(f.distances("vit")),
    ),
    Finding(
        "distance-rises",
        "Attention distance increases with depth.",
        "Dosovitskiy et al. 2021, Sec. 4.5, App. D.6, Figs. 7 right, 10",
        "mean distance of all heads of the upper half of the blocks less the lower half's",
        "of uniform attention's distance",
        ("vit",),
        lambda f: of.rise(f.distances("vit")),
    ),
    Finding(
        "little-data",
        "With less training data the lower layers do not learn to attend locally.",
        "Raghu et al. 2021, Sec. 5, Fig. 4",
        "the most local head of the two lowest blocks, trained on a tenth less trained on all",
        "of uniform attention's distance",
        ("vit-10pct", "vit"),
        lambda f: of.nearest_head(f.distances("vit-10pct")) - of.nearest_head(f.distances("vit")),
    ),
    Finding(
        "local-heads-cnn",
        "The lower ResNet layers resemble the local heads of the first block most.",
        "Raghu et al. 2021, Sec. 5, Fig. 5",
        "mean CKA with the ResNet's lower blocks, of the most local group of heads less the most "
        "global",
        "CKA",
        ("vit", "resnet"),
        lambda f: of.local_less_global(f.cnn_like("vit", "resnet")),
    ),
    Finding(
        "offset-heads",
        "There are heads that attend locally, to a place beside the query (offset local heads).",
        "Walmer et al. 2023, Sec. 4.2, Figs. 3, 14",
        "the largest share of a head's attention in 5 x 5 cells around a focus at least half a "
        "cell off the query, less a half",
        "share of attention",
        ("vit",),
        lambda f: of.above(0.5, of.offset_focus(f.heads("vit"))),
    ),
    Finding(
        "repeating",
        "With labels, queries attend more alike in the later layers than in the earlier.",
        "Walmer et al. 2023, Sec. 4.1, Fig. 2",
        "query_repetition (1: all queries attend to the same keys, 0: independently), mean of the "
        "heads of the upper half of the blocks less the lower half's",
        "query_repetition",
        ("vit",),
        lambda f: _repetition(f, "vit"),
    ),
    Finding(
        "repeating-masked",
        "The rise of `repeating` is larger with labels than by reconstruction.",
        "Walmer et al. 2023, Sec. 4.1, Fig. 2",
        "as `repeating`, of vit less vit-masked",
        "query_repetition",
        ("vit", "vit-masked"),
        lambda f: _repetition(f, "vit") - _repetition(f, "vit-masked"),
    ),
    Finding(
        "order-masked",
        "With labels distance rises further towards the last layers than by reconstruction.",
        "Walmer et al. 2023, Sec. 4.3, Fig. 4 right",
        "mean distance of the heads of the upper half of the blocks less the lower half's, of vit "
        "less vit-masked",
        "of uniform attention's distance",
        ("vit", "vit-masked"),
        lambda f: of.rise(f.distances("vit")) - of.rise(f.distances("vit-masked")),
    ),
)
