"""Slow versions of the measures of similarity, from features in float64, one step after another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

Array = NDArray[Any]


def cosines(x: Array) -> Array:
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    found: Array = unit @ unit.T
    return found


def neighbours(x: Array, k: int) -> list[list[int]]:
    """The k nearest of each row by cosine, ties to the lower index."""
    similar = cosines(x)
    found = []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        found.append(sorted(others, key=lambda j: (-similar[i, j], j))[:k])
    return found


def mutual_knn(x: Array, y: Array, k: int) -> float:
    pairs = zip(neighbours(x, k), neighbours(y, k), strict=True)
    return float(np.mean([len({*a} & {*b}) / k for a, b in pairs]))


def mask(x: Array, k: int) -> Array:
    found = np.zeros((len(x), len(x)))
    for i, row in enumerate(neighbours(x, k)):
        found[i, row] = 1
    return found


def song(k: Array, other: Array) -> float:
    """HSIC_1 by its three terms, for matrices that need not be symmetric."""
    n = len(k)
    k, other = k * (1 - np.eye(n)), other * (1 - np.eye(n))
    ones = np.ones(n)
    terms = np.trace(k @ other) + (ones @ k @ ones) * (ones @ other @ ones) / (
        (n - 1) * (n - 2)
    )
    return float((terms - 2 / (n - 2) * (ones @ k @ other @ ones)) / (n * (n - 3)))


def cknna(x: Array, y: Array, k: int) -> float:
    of_x, of_y, kernel, other = mask(x, k), mask(y, k), cosines(x), cosines(y)
    both = of_x * of_y
    own = song(of_x * kernel, of_x * kernel) * song(of_y * other, of_y * other)
    return song(both * kernel, both * other) / float(np.sqrt(own))


def rsa(x: Array, y: Array, rdm: str) -> float:
    def upper(z: Array) -> Array:
        far = np.zeros((len(z), len(z)))
        for i in range(len(z)):
            for j in range(len(z)):
                if rdm == "pearson":
                    far[i, j] = 1 - np.corrcoef(z[i], z[j])[0, 1]
                else:
                    far[i, j] = np.linalg.norm(z[i] - z[j])
        return far[np.triu_indices(len(z), 1)]

    return float(spearmanr(upper(x), upper(y)).statistic)


def centred(x: Array) -> Array:
    found: Array = x - x.mean(0)
    return found


def procrustes(x: Array, y: Array) -> float:
    a, b = centred(x), centred(y)
    nuclear = np.linalg.svd(a.T @ b, compute_uv=False).sum()
    cosine = nuclear / (np.linalg.norm(a) * np.linalg.norm(b))
    return float(1 - 2 / np.pi * np.arccos(min(1, cosine)))


def svcca(x: Array, y: Array, variance: float) -> float:
    def leading(z: Array) -> Array:
        u, s, _ = np.linalg.svd(centred(z), full_matrices=False)
        kept = int((np.cumsum(s**2) / (s**2).sum() < variance - 1e-12).sum()) + 1
        return u[:, :kept]

    return float(np.linalg.svd(leading(x).T @ leading(y), compute_uv=False).mean())


def gulp(x: Array, y: Array, ridge: float) -> float:
    """In feature space: with S covariances of total variance 1, tr of products of their resolvents
    (Boix-Adsera et al. 2022, Prop. 1)."""
    a, b = (centred(z) / np.linalg.norm(centred(z)) for z in (x, y))

    def resolvent(z: Array) -> Array:
        inverse: Array = np.linalg.inv(z.T @ z + ridge * np.eye(z.shape[1]))
        return inverse

    ia, ib = resolvent(a), resolvent(b)
    aa = np.trace(ia @ (a.T @ a) @ ia @ (a.T @ a))
    bb = np.trace(ib @ (b.T @ b) @ ib @ (b.T @ b))
    ab = np.trace(ia @ (a.T @ b) @ ib @ (b.T @ a))
    return float(aa + bb - 2 * ab)


def ridge_r2(target: Array, source: Array) -> float:
    """Leaving each image out, fitting with every ridge anew."""
    from sklearn.linear_model import Ridge

    n = len(target)
    errors = []
    for power in range(-6, 7):
        alpha = 10.0**power * (centred(source) ** 2).sum() / n
        squared = 0.0
        for i in range(n):
            rest = np.arange(n) != i
            # The kernel's centre is that of all images: the intercept is free, so it is no matter.
            model = Ridge(alpha=alpha, solver="svd").fit(source[rest], target[rest])
            squared += float(
                ((model.predict(source[i : i + 1])[0] - target[i]) ** 2).sum()
            )
        errors.append(squared)
    baseline = sum(
        float(((np.delete(target, i, 0).mean(0) - target[i]) ** 2).sum())
        for i in range(n)
    )
    return 1 - min(errors) / baseline
