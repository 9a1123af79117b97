"""Training data, tasks and supervision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitsee_core.study.findings import estimates as of
from vitsee_core.study.findings.finding import Finding

if TYPE_CHECKING:
    from vitsee_core.study.findings.model_tables import ModelTables

SECTION = "Training data, tasks and supervision (Raghu et al. 2021; Walmer et al. 2023)"


def _seeds(f: ModelTables) -> of.Estimate:
    pairs = "same-depth"
    fewer = of.lower_less_upper(f.cka("vit", "vit-10pct", pairs))
    return fewer - of.lower_less_upper(f.cka("vit", "vit-seed1", pairs))


FINDINGS = (
    Finding(
        "more-data",
        "With a tenth of the data the lower layers differ less than the upper ones.",
        "Raghu et al. 2021, Sec. 8, Fig. 12",
        "CKA of the same blocks of vit and vit-10pct, mean of the lower less the upper half "
        "(vit and vit-10pct began with the same weights, vit-seed1 with others)",
        "CKA",
        ("vit", "vit-10pct"),
        lambda f: of.lower_less_upper(f.cka("vit", "vit-10pct", "same-depth")),
    ),
    Finding(
        "more-data-seed",
        "More so than another seed on the same data does.",
        "A control of Raghu et al. 2021, Fig. 12, not in the paper",
        "as `more-data`, less the same of vit and vit-seed1",
        "CKA",
        ("vit", "vit-10pct", "vit-seed1"),
        _seeds,
    ),
    Finding(
        "alike-supervision",
        "Like supervision makes like class tokens in the last layer.",
        "Walmer et al. 2023, Sec. 5.1, Fig. 6 left",
        "CKA of the class tokens of the last block of vit and vit-seed1, both trained with labels, "
        "less that of vit and vit-masked",
        "CKA",
        ("vit", "vit-seed1", "vit-masked"),
        lambda f: f.last_cls("vit", "vit-seed1") - f.last_cls("vit", "vit-masked"),
    ),
    Finding(
        "best-classes",
        "For classes the last layer is best.",
        "Walmer et al. 2023, Sec. 6.3, Table 1 (FS)",
        "k-NN top-1 of the last block less that of the best other block",
        "accuracy",
        ("vit",),
        lambda f: of.last_less_best(f.neighbours("vit")),
    ),
    Finding(
        "best-keypoints",
        "For keypoints a layer before the last is best.",
        "Walmer et al. 2023, Sec. 6.2, 6.3, Table 1 (FS)",
        "PCK at 0.1 of the middle block less that of the last, on the bundled miniature of "
        "SPair-71k",
        "share of keypoints",
        ("vit",),
        lambda f: of.at_depth(f.keypoints("vit"), 0.5) - of.at_depth(f.keypoints("vit"), 1),
    ),
    Finding(
        "best-supervision",
        "By reconstruction the last layer is worse for classes than with labels.",
        "Walmer et al. 2023, Sec. 6.3, Table 1 (FS, MAE)",
        "k-NN top-1 of the last block, vit less vit-masked",
        "accuracy",
        ("vit", "vit-masked"),
        lambda f: of.at_depth(f.neighbours("vit"), 1) - of.at_depth(f.neighbours("vit-masked"), 1),
    ),
)
