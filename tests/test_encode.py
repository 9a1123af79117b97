"""vitsee encode: stores of codes against codes of the tokens, and what the reconstruction loses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.features import balanced, class_features, vit_sites
from tests.stores import VIT, write_model
from tests.test_dictionaries import D, K, made
from vitsee_cli.main import main
from vitsee_core.analyses import cluster, pca
from vitsee_core.runtime.execution import Execution
from vitsee_core.sae import encoding
from vitsee_core.sae.dictionary import Dictionary
from vitsee_core.sae.dictionary_files import Overrides, for_sites, save_dictionary
from vitsee_core.sae.encoding import encode_store
from vitsee_stores import Store, StoreWriter, open_store, require_paired
from vitsee_stores.errors import IdentityMismatch, MissingInput, SiteError, VitseeError
from vitsee_stores.layout import TokenLayout
from vitsee_stores.plan import Clip

Array = NDArray[Any]
N, SITE = 21, "blocks.1.out"
SITES = vit_sites(N, dim=D)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    valid = np.ones(N, bool)
    valid[[4, 16]] = False
    return write_model(
        tmp_path_factory.mktemp("encode") / "a.zarr", SITES, valid=valid, slab=8,
        labels=balanced(N, 3), sizes=(32, 48),
    )  # fmt: skip


def all_tokens(store: Store, site: str = SITE) -> Array:
    """(images, tokens, dim) of all rows, NaN for those that could not be read."""
    return np.asarray(store.acts(site, "all")[:], np.float32)


@pytest.mark.parametrize("most", [1 << 30, 4 * 7 * K * 3, 1])
@pytest.mark.parametrize("kind", ["topk", "jumprelu", "linear", "nearest"])
def test_codes_of_every_token_are_stored(
    store: Store, tmp_path: Path, kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "MAX_CODES_BYTES", most)
    d = made(kind, k=3)
    codes, table = encode_store(store, {SITE: d}, tmp_path / "codes.zarr")
    assert codes.plan.slab == {1 << 30: 8, 4 * 7 * K * 3: 2, 1: 1}[most]
    x = all_tokens(store)
    wanted = np.full((*x.shape[:2], K), np.nan, np.float32)
    wanted[store.valid] = d.encode(x[store.valid].reshape(-1, D)).reshape(-1, 7, K)
    np.testing.assert_allclose(all_tokens(codes), wanted, atol=1e-6)
    np.testing.assert_allclose(codes.pooled(SITE, "cls")[:], wanted[:, 0], atol=1e-6)
    np.testing.assert_allclose(
        codes.pooled(SITE, "mean")[:], wanted[:, 1:].mean(1), atol=1e-6
    )
    assert require_paired(store, codes).tolist() == store.valid.tolist()
    assert codes.manifest.identity["weights"].startswith("codes of"), "extract refuses it"
    assert codes.site(SITE).depth == store.site(SITE).depth
    assert codes.site(SITE).layout == store.site(SITE).layout
    np.testing.assert_array_equal(codes.samples.label, store.samples.label)
    valid = store.valid
    tokens, sent = (v[valid].reshape(-1, v.shape[-1]).astype(float) for v in (x, wanted))
    error = ((tokens - sent @ d.w_dec - d.b_dec) ** 2).sum()
    spread = ((tokens - tokens.mean(0)) ** 2).sum()
    found = dict(zip(table["metric"].tolist(), table["value"].tolist(), strict=True))
    assert found["r2"] == pytest.approx(1 - error / spread, abs=1e-4)
    assert found["l0"] == pytest.approx((sent != 0).sum(1).mean())
    assert found["never_active"] == pytest.approx((sent == 0).all(0).mean())


def test_codes_of_clips(tmp_path: Path) -> None:
    """Tokens stay in time, rows and columns; a class token of each frame has its codes, `cls` their
    mean."""
    clips = TokenLayout(("cls.0", "cls.1"), (1, 3), stride_px=(16.0, 16.0), frames=2)
    x = np.random.default_rng(0).normal(size=(5, 8, D)).astype(np.float32)
    about = {"layout": clips, "clip": Clip(2, by_frame=True), "slab": 2}
    store = write_model(tmp_path / "a.zarr", {SITE: x}, **about)
    d = made("topk", k=3)
    codes, _ = encode_store(store, {SITE: d}, tmp_path / "codes.zarr")
    wanted = d.encode(x.reshape(-1, D)).reshape(5, 8, K)
    np.testing.assert_allclose(all_tokens(codes), wanted, atol=1e-6)
    assert codes.plan.clip == store.plan.clip
    assert codes.acts(SITE, "patches").shape == (5, 2, 1, 3, K)
    cls = codes.pooled(SITE, "cls")[:]
    np.testing.assert_allclose(cls, wanted[:, :2].mean(1), atol=1e-6)


def test_a_whole_basis_loses_nothing(store: Store, tmp_path: Path) -> None:
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(D, D)))
    w = q.astype(np.float32)
    d = Dictionary("linear", w.T.copy(), np.ones(D, np.float32), w, np.zeros(D, np.float32),
                   centre=True)  # fmt: skip
    _, table = encode_store(store, {SITE: d, "pooled": d}, tmp_path / "codes.zarr")
    assert table.filter(metric="r2")["value"] == pytest.approx([1, 1])


def test_vectors_and_several_sites(store: Store, tmp_path: Path) -> None:
    first, second = made("relu"), made("topk", 3, k=2)
    codes, _ = encode_store(
        store, {"blocks.0.out": first, "pooled": second}, tmp_path / "c.zarr"
    )
    pooled = np.asarray(store.vectors("pooled")[:], np.float32)
    np.testing.assert_allclose(
        codes.vectors("pooled")[:][store.valid],
        second.encode(pooled[store.valid]),
        atol=1e-6,
    )
    assert list(codes.sites) == ["blocks.0.out", "pooled"]


def test_an_interrupted_one_is_completed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, place = made("topk", k=3), tmp_path / "codes.zarr"
    _, wanted = encode_store(store, {SITE: d}, tmp_path / "whole.zarr")
    write, written = StoreWriter.write_slab, list[int]()

    def stopped(self: StoreWriter, k: int, *rest: Any) -> int:
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(k)
        return write(self, k, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(StoreWriter, "write_slab", stopped)
        with pytest.raises(KeyboardInterrupt):
            encode_store(store, {SITE: d}, place)
    with pytest.raises(VitseeError):
        open_store(place)

    def listed(self: StoreWriter, k: int, *rest: Any) -> int:
        written.append(k)
        return write(self, k, *rest)

    monkeypatch.setattr(StoreWriter, "write_slab", listed)
    codes, table = encode_store(store, {SITE: d}, place)
    assert written == [0, 1, 2]
    assert table["value"].tolist() == wanted["value"].tolist()
    np.testing.assert_array_equal(
        all_tokens(codes), all_tokens(open_store(tmp_path / "whole.zarr"))
    )
    with pytest.raises(IdentityMismatch, match="made with other choices"):
        encode_store(store, {SITE: made("topk", k=2)}, place)
    encode_store(store, {SITE: made("topk", k=2)}, place, force=True)


def test_analyses_read_codes(tmp_path: Path) -> None:
    labels = balanced(60, 3)
    x = class_features(labels, VIT.n_tokens, D, signal=3.0)
    store = write_model(tmp_path / "a.zarr", {SITE: x}, labels=labels)
    codes, _ = encode_store(store, {SITE: made("relu")}, tmp_path / "codes.zarr")
    purity = cluster.run(codes, tokens="mean", baselines=()).filter(metric="purity")
    assert purity["value"] > 0.9
    assert purity["weights"].tolist()[0].endswith("codes of a dictionary")
    assert len(pca.run(codes, components=3).filter(metric="explained_variance")) == 3


@pytest.mark.parametrize(
    ("sites", "d", "more", "message"),
    [
        ({"logits": "relu"}, D, {}, "no site logits|logits"),
        (
            {SITE: "relu"},
            D + 1,
            {},
            rf"the dictionary has {D + 1} channels and {SITE} of a {D}",
        ),
        (
            {SITE: "relu"},
            D,
            {"execution": Execution(memory=10)},
            "of memory; --memory is",
        ),
    ],
)
def test_refusals(
    store: Store,
    tmp_path: Path,
    sites: dict[str, str],
    d: int,
    more: dict[str, Any],
    message: str,
) -> None:
    eye = np.eye(d, dtype=np.float32)
    one = Dictionary("linear", eye, eye[0], eye, eye[0])
    with pytest.raises(VitseeError, match=message):
        encode_store(store, dict.fromkeys(sites, one), tmp_path / "codes.zarr", **more)
    assert not list(tmp_path.iterdir())


def test_numbers_beyond_float16_are_refused(store: Store, tmp_path: Path) -> None:
    d = made("linear", w_enc=np.full((D, K), 1e6, np.float32))
    with pytest.raises(VitseeError, match=r"beyond float16; give --dtype float32"):
        encode_store(store, {SITE: d}, tmp_path / "codes.zarr", dtype="float16")


def test_pooled_only_and_numbers_of_dictionaries(store: Store, tmp_path: Path) -> None:
    save_dictionary(made("relu"), tmp_path / "d.safetensors")
    save_dictionary(made("relu", site=SITE), tmp_path / "own.safetensors")
    plain, own = tmp_path / "d.safetensors", tmp_path / "own.safetensors"
    assert [*for_sites(store, [own], [], Overrides())] == [SITE]
    assert len(for_sites(store, [plain], ["blocks"], Overrides())) == 3
    with pytest.raises(
        SiteError, match="does not say which site it was fitted on; give --sites"
    ):
        for_sites(store, [plain], [], Overrides())
    with pytest.raises(
        VitseeError, match="2 dictionaries for 3 sites; expected one, or one for"
    ):
        for_sites(store, [plain, own], ["blocks"], Overrides())
    pooled = write_model(tmp_path / "p.zarr", {SITE: SITES[SITE]}, tokens="pooled")
    with pytest.raises(MissingInput):
        encode_store(pooled, {SITE: made("relu")}, tmp_path / "codes.zarr")


def test_the_command(store: Store, tmp_path: Path) -> None:
    save_dictionary(made("topk", k=2, site=SITE), tmp_path / "d.safetensors")
    words = ["encode", str(store.path), "--dictionary", str(tmp_path / "d.safetensors")]
    words += ["-o", str(tmp_path / "codes.zarr"), "--table", str(tmp_path / "t.csv")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert first == f"{tmp_path / 'codes.zarr'}: 21 images"
    assert second.startswith(f"{SITE}: r2 ")
    assert ", l0 " in second
    assert (tmp_path / "t.csv").read_text().count("\n") == 4
    more = CliRunner().invoke(main, [*words, "--force", "--k", "3"])
    assert more.exit_code == 0, more.output
    checked = CliRunner().invoke(
        main, ["validate", str(tmp_path / "codes.zarr"), "--deep"]
    )
    assert checked.exit_code == 0, checked.output
