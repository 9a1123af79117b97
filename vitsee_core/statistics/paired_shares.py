"""Two proportions of the same images: their difference's interval, and McNemar's exact test.

Only discordant images count, those that are right in one and wrong in the other: `more` of them in
the first direction and `fewer` in the second. With 1 added to both and 2 to n, Wald's interval

    d -+ z sqrt((p + q - d^2) / (n + 2)),  p = (more + 1) / (n + 2), q = (fewer + 1) / (n + 2)
    d = p - q

keeps its coverage at small counts, and a width where there is no discordant image (Bonett and Price
2012; recommended by Fagerland et al. 2014).
"""

from __future__ import annotations

from math import sqrt

from vitsee_core.statistics.shares import Z

METHOD = (
    "Bonett and Price's interval of the difference of two paired proportions (2012), of the "
    "numbers of images that only one of both has right"
)
TEST = "McNemar's exact test (1947), two-sided: binomial, of the discordant images"


def difference_interval(more: int, fewer: int, n: int) -> tuple[float, float]:
    """Low and high of the 95 % interval of (more - fewer) / n, within -1 and 1."""
    p, q = (more + 1) / (n + 2), (fewer + 1) / (n + 2)
    d = p - q
    half = Z * sqrt((p + q - d**2) / (n + 2))
    return max(d - half, -1.0), min(d + half, 1.0)


def mcnemar(more: int, fewer: int) -> float:
    """The p-value that both directions are equally likely; 1 without a discordant image."""
    from scipy.stats import binomtest

    n = more + fewer
    return float(binomtest(more, n, 0.5).pvalue) if n else 1.0
