"""Draws docs/similarity-chance.png: measures of similarity of independent Gaussian features, by the
number of images; as they are, and calibrated against permuted images.

    python tools/similarity_by_chance.py docs/similarity-chance.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vitsee_core.analyses.similarity import LABELS
from vitsee_core.analyses.similarity.comparing import calibrate
from vitsee_core.analyses.similarity.decompositions import Procrustes, Svcca
from vitsee_core.analyses.similarity.measure import Measure, MutualKnn, SiteGram
from vitsee_core.analyses.similarity.products import Cka, Rsa
from vitsee_core.figures.panels import handles_of, legend_below, panels
from vitsee_core.figures.plotting import (
    colour,
    marker,
    reference_line,
    save_figure,
    styled,
)
from vitsee_core.similarity.representation import Shift
from vitsee_core.types import Float

DIM = 5000
IMAGES = (50, 100, 200, 300, 500, 800)
PERMUTATIONS = 39
BIASED = "CKA (biased, Kornblith et al. 2019)"
PAIR = np.array([[0, 1]])


def gram_of(x: Float) -> SiteGram:
    """Of features that were not shifted."""
    zero = Shift(np.zeros(len(x)), x.mean(1), 0.0, x.shape[1])
    return SiteGram((x @ x.T).astype(np.float32), zero)


def of_measure(
    measure: Measure, states: list[Any], orders: list[Any]
) -> tuple[float, float]:
    """The value, and the calibrated one."""
    value = measure.compare(states, states, PAIR)
    null = measure.null(states, states, PAIR, orders)
    found = calibrate(value, null, np.zeros(1, np.int64), distance=measure.distance)
    return float(value[0]), float(found["calibrated"][0])


def of_biased_cka(grams: list[SiteGram], orders: list[Any]) -> tuple[float, float]:
    """The same of tr(K L) / sqrt(tr(K K) tr(L L)), K and L centred."""
    k, other = (gram.centred() for gram in grams)
    scale = np.linalg.norm(k) * np.linalg.norm(other)
    value = np.array([(k * other).sum() / scale])
    null = np.array([[(k * other[np.ix_(o, o)]).sum() / scale] for o in orders])
    found = calibrate(value, null, np.zeros(1, np.int64), distance=False)
    return float(value[0]), float(found["calibrated"][0])


def values() -> dict[str, list[tuple[float, float]]]:
    """Label -> (value, calibrated) by number of images."""
    found: dict[str, list[tuple[float, float]]] = {}
    for n in IMAGES:
        rng = np.random.default_rng(0)
        grams = [gram_of(rng.normal(size=(n, DIM))) for _ in range(2)]
        orders = [rng.permutation(n) for _ in range(PERMUTATIONS)]
        found.setdefault(BIASED, []).append(of_biased_cka(grams, orders))
        for measure in (Svcca(), Procrustes(), MutualKnn(), Rsa(), Cka()):
            states = [measure.prepare(gram) for gram in grams]
            found.setdefault(LABELS[measure.name], []).append(
                of_measure(measure, states, orders)
            )
    return found


@styled
def draw(found: dict[str, list[tuple[float, float]]]) -> Figure:
    """Left as they are, right calibrated."""
    figure, every = panels(2, widest=32, height=18)
    titles = (
        f"as they are ({DIM} channels)",
        f"calibrated ({PERMUTATIONS} permutations)",
    )
    for at, (axes, title) in enumerate(zip(every, titles, strict=True)):
        for i, (label, pairs) in enumerate(found.items()):
            own = [pair[at] for pair in pairs]
            axes.plot(IMAGES, own, color=colour(i), marker=marker(i), label=label)
        reference_line(axes, 0.0, "")
        axes.set_xscale("log")
        axes.set_xticks(IMAGES, [str(n) for n in IMAGES])
        axes.minorticks_off()
        axes.set_ylim(-0.05, 1.05)
        axes.set_title(title)
        axes.set_xlabel("images")
    every[0].set_ylabel("similarity of independent features")
    legend_below(figure, handles_of(every[:1]))
    return figure


if __name__ == "__main__":
    save_figure(draw(values()), Path(sys.argv[1]), force=True)
