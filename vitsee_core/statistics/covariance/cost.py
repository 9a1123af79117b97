"""Estimated time of second moments, logged before the work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.product_time import SHARE, WORTH_SAYING, cpu_rate, rough_time

if TYPE_CHECKING:
    from vitsee_core.features import SiteFeatures

log = logging.getLogger(__name__)
DOUBLE = 0.5  # of the rate of products in single precision


def say_cost(sites: Sequence[SiteFeatures], n_images: int) -> float:
    """Log the estimated time of one pass over the tokens of these sites, from a short trial; only
    at debug level (-v) if it is seconds.

    Returns:
        Multiply-adds: tokens x dim^2, summed over sites.
    """
    products = float(sum(n_images * len(one.tokens) * one.dim**2 for one in sites))
    if not products:
        return products
    read = sum(one.slab_bytes / one.store.plan.slab / 2 * n_images for one in sites)
    seconds = products / (SHARE * DOUBLE * cpu_rate())
    log.log(
        logging.INFO if seconds >= WORTH_SAYING else logging.DEBUG,
        "%s: second moments of %d sites over %d images: %.1e multiply-adds, %s of tokens, %s; "
        "twice as long for twice the images (--images N takes fewer)",
        *(sites[0].store.label, len(sites), n_images, products),
        *(human_bytes(read), rough_time(seconds)),
    )
    return products
