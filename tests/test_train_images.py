"""TRAIN and TEST: which images --images counts, and remarks on stores that differ in precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stores import write_labelled
from vitsee_core.analyses import knn, probe
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

N_TRAIN, N_TEST = 40, 30


def stores(tmp_path: Path, train_precision: str = "fp32") -> tuple[Store, Store]:
    rng = np.random.default_rng(0)
    made = []
    for name, n, offset in (("train", N_TRAIN, 0), ("test", N_TEST, 1000)):
        labels = np.arange(n) % 2
        x = rng.normal(size=(n, 6)) + labels[:, np.newaxis]
        precision = train_precision if name == "train" else "fp32"
        made.append(
            write_labelled(
                tmp_path / f"{name}.zarr", {"pooled": x}, labels, hash_offset=offset,
                identity={"precision": precision},
            )
        )  # fmt: skip
    return made[0], made[1]


def ridge(train: Store, test: Store, n_train: int, n_test: int) -> float:
    """Top-1 of a ridge regression without its l2's choice, by numpy, as an oracle."""
    x, y = (store.array("vectors/pooled")[:].astype(float) for store in (train, test))
    labels = [store.samples.label for store in (train, test)]
    x, y = x[:n_train], y[:n_test]
    targets = np.where(labels[0][:n_train, np.newaxis] == np.arange(2), 1.0, -1.0)
    centre, middle = x.mean(0), targets.mean(0)
    z = x - centre
    # l2 as given, the intercept not penalised
    weights = np.linalg.solve(z.T @ z + 1.0 * np.eye(6), z.T @ (targets - middle))
    return float(
        (((y - centre) @ weights + middle).argmax(1) == labels[1][:n_test]).mean()
    )


@pytest.mark.parametrize(
    ("options", "n_train", "n_test"),
    [
        ({}, N_TRAIN, N_TEST),
        ({"images": 10}, N_TRAIN, 10),
        ({"train_images": 16}, 16, N_TEST),
        ({"images": 10, "train_images": 16}, 16, 10),
    ],
)
def test_images_are_those_of_test(
    options: dict[str, Any], n_train: int, n_test: int, tmp_path: Path
) -> None:
    train, test = stores(tmp_path)
    for analysis in (probe, knn):
        more: dict[str, Any] = {"ks": [3]} if analysis is knn else {"l2": [1.0]}
        table = analysis.run(train, test, sites=["pooled"], **more, **options)
        assert table.notes["train"]["rows"] == n_train
        assert table.notes["tests"][0]["rows"] == n_test
        assert set(table["n_images"]) == {n_test}
    fitted = probe.run(
        train,
        test,
        sites=["pooled"],
        l2=[1.0],
        standardise=False,
        metrics=["top1"],
        **options,
    )
    assert fitted["value"][0] == pytest.approx(ridge(train, test, n_train, n_test))


def test_one_store_has_images_alone(tmp_path: Path) -> None:
    train, _ = stores(tmp_path)
    with pytest.raises(VitseeError, match="without TEST give --images"):
        probe.run(train, holdout=0.2, sites=["pooled"], train_images=10)
    table = probe.run(train, holdout=0.5, sites=["pooled"], l2=[1.0], images=20)
    assert table.notes["train"]["rows"] + table.notes["tests"][0]["rows"] == 20


def test_precisions_that_differ_are_a_remark(tmp_path: Path) -> None:
    train, test = stores(tmp_path, "bf16")
    for analysis in (probe, knn):
        more: dict[str, Any] = {"ks": [3]} if analysis is knn else {"l2": [1.0]}
        table = analysis.run(train, test, sites=["pooled"], **more)
        (remark,) = [text for text in table.notes["remarks"] if "precision" in text]
        assert "bf16 (train)" in remark and "fp32 (test)" in remark
    (tmp_path / "same").mkdir()
    train, test = stores(tmp_path / "same")
    table = probe.run(train, test, sites=["pooled"], l2=[1.0])
    assert not any("precision" in text for text in table.notes["remarks"])
