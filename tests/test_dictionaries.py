"""Codes of tokens, and the files of trainers: loops, hand-computed codes, wrong files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from scipy.optimize import nnls

from vitsee_core.sae.dictionary import Dictionary
from vitsee_core.sae.dictionary_files import (
    Overrides,
    read_dictionary,
    save_dictionary,
)
from vitsee_stores.errors import VitseeError

Array = NDArray[Any]
D, K, N = 5, 8, 40


def made(kind: str, seed: int = 0, **more: Any) -> Dictionary:
    rng = np.random.default_rng(seed)
    shapes: dict[str, Any] = {"w_dec": (K, D), "b_dec": D, "w_enc": (D, K), "b_enc": K}
    parts: dict[str, Any] = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
    }
    return Dictionary(
        kind, **{**parts, "threshold": rng.normal(size=K).astype(np.float32), **more}
    )


def tokens(seed: int = 1) -> Array:
    return np.random.default_rng(seed).normal(size=(N, D)).astype(np.float32)


def loop(d: Dictionary, x: Array) -> Array:
    """Each code by its definition, one number after the other in float64."""
    codes = np.zeros((len(x), d.n))
    assert d.w_enc is not None and d.b_enc is not None
    for i, row in enumerate(x.astype(float)):
        if d.clamp:
            row = np.array([max(v, 0.0) for v in row])
        y = row - d.b_dec if d.centre else row
        h = [sum(y[c] * float(d.w_enc[c, j]) for c in range(D)) + float(d.b_enc[j])
             for j in range(d.n)]  # fmt: skip
        order = sorted(range(d.n), key=lambda j: -h[j])
        for j in range(d.n):
            if d.kind == "linear":
                codes[i, j] = h[j]
            elif d.kind == "relu":
                codes[i, j] = max(h[j], 0)
            elif d.kind == "topk":
                assert d.k is not None
                if j in order[: d.k]:
                    codes[i, j] = max(h[j], 0) if d.positive else h[j]
            elif d.kind in ("batchtopk", "jumprelu"):
                assert d.threshold is not None
                codes[i, j] = h[j] if h[j] > 0 and h[j] > d.threshold[j] else 0
            else:
                distances = [
                    ((row - centre) ** 2).sum() for centre in d.w_dec.astype(float)
                ]
                codes[i, int(np.argmin(distances))] = 1
    return codes


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("linear", {}),
        ("relu", {}),
        ("relu", {"clamp": True}),
        ("topk", {"k": 3}),
        ("topk", {"k": 6, "positive": False}),
        ("topk", {"k": K}),
        ("batchtopk", {"threshold": np.full(K, 0.4, np.float32)}),
        ("jumprelu", {}),
        ("nearest", {}),
    ],
)
def test_codes_are_those_of_a_loop(kind: str, more: dict[str, Any], centre: bool) -> None:
    d, x = made(kind, centre=centre, **more), tokens()
    codes = d.encode(x)
    wanted = loop(d, x)
    np.testing.assert_allclose(codes, wanted, atol=1e-5)
    np.testing.assert_array_equal(codes != 0, wanted != 0)
    decoded = wanted @ d.w_dec.astype(float) + d.b_dec
    np.testing.assert_allclose(d.decode(codes), decoded, atol=1e-4)


def test_top_two_by_hand() -> None:
    eye = np.eye(3, dtype=np.float32)
    d = Dictionary(
        "topk", eye, np.zeros(3, np.float32), eye, np.zeros(3, np.float32), k=2
    )
    x = np.array([[3, 1, 2], [-1, -3, -2]], np.float32)
    np.testing.assert_array_equal(d.encode(x), [[3, 0, 2], [0, 0, 0]])


def test_non_negative_codes_are_those_of_scipy() -> None:
    d = Dictionary("nnls", np.abs(made("linear").w_dec[:3]), np.zeros(D, np.float32))
    x = np.abs(tokens())
    wanted = [nnls(d.w_dec.T.astype(float), row.astype(float))[0] for row in x]
    np.testing.assert_allclose(d.encode(x), wanted, atol=5e-3)
    with pytest.raises(VitseeError, match="a token has negative numbers"):
        d.encode(-x)


def test_the_activation_of_clusters_is_the_distance() -> None:
    d, x = made("nearest"), tokens()
    far = ((x[:, None] - d.w_dec) ** 2).sum(-1)
    np.testing.assert_allclose(d.activation(x, d.encode(x)), -far, atol=1e-4)


# ---------------------------------------------------------------- files of trainers


def named(d: Dictionary, *, threshold: bool = False) -> dict[str, Array]:
    parts = {"W_dec": d.w_dec, "b_dec": d.b_dec, "W_enc": d.w_enc, "b_enc": d.b_enc}
    parts |= {"threshold": d.threshold} if threshold else {}
    return {name: np.ascontiguousarray(v) for name, v in parts.items() if v is not None}


@pytest.mark.parametrize(
    "kind", ["linear", "relu", "topk", "batchtopk", "jumprelu", "nearest"]
)
def test_our_own_file_brings_back_the_dictionary(tmp_path: Path, kind: str) -> None:
    d = made(kind, k=3, centre=True, positive=False, clamp=True, site="blocks.3.out")
    save_dictionary(d, tmp_path / "d.safetensors")
    again = read_dictionary(tmp_path / "d.safetensors")
    np.testing.assert_array_equal(again.encode(tokens()), d.encode(tokens()))
    assert (again.kind, again.site, again.centre) == (kind, "blocks.3.out", True)
    with pytest.raises(VitseeError, match="exists"):
        save_dictionary(d, tmp_path / "d.safetensors")


def test_saelens(tmp_path: Path) -> None:
    d = made("jumprelu", centre=True)
    save_file(named(d, threshold=True), tmp_path / "sae_weights.safetensors")
    config = {
        "architecture": "jumprelu",
        "d_in": D,
        "d_sae": K,
        "apply_b_dec_to_input": True,
    }
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    found = read_dictionary(tmp_path / "sae_weights.safetensors")
    np.testing.assert_array_equal(found.encode(tokens()), d.encode(tokens()))
    config = {"architecture": "topk", "k": 2, "rescale_acts_by_decoder_norm": True}
    (tmp_path / "cfg.json").write_text(
        json.dumps(config | {"apply_b_dec_to_input": False})
    )
    rescaled = read_dictionary(tmp_path / "sae_weights.safetensors")
    assert d.w_enc is not None and d.b_enc is not None
    h = (tokens() @ d.w_enc + d.b_enc) * np.linalg.norm(d.w_dec, axis=1)
    best = np.sort(h, 1)[:, -2:-1]
    np.testing.assert_allclose(
        rescaled.encode(tokens()), np.where(h >= best, np.maximum(h, 0), 0), atol=1e-5
    )


def test_saev(tmp_path: Path) -> None:
    d = made("topk", k=3, positive=False)
    state = {name: torch.from_numpy(v) for name, v in named(d).items()}
    activation = {"cls": "TopK", "params": {"top_k": 3}}
    header = {"schema": 5, "cfg": {"activation": activation}}
    with open(tmp_path / "sae.pt", "wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        torch.save(state, file)
    found = read_dictionary(tmp_path / "sae.pt")
    np.testing.assert_array_equal(found.encode(tokens()), d.encode(tokens()))
    threshold = named(d) | {"activation.threshold": np.array(0.3, np.float32)}
    save_file(threshold, tmp_path / "batch.safetensors")
    found = read_dictionary(tmp_path / "batch.safetensors")
    wanted = made("batchtopk", threshold=np.full(K, 0.3, np.float32))
    np.testing.assert_array_equal(found.encode(tokens()), wanted.encode(tokens()))


def test_overcomplete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    d = made("topk", k=3)
    assert d.w_enc is not None and d.b_enc is not None
    state = {
        "encoder.final_block.0.weight": np.ascontiguousarray(d.w_enc.T),
        "encoder.final_block.0.bias": d.b_enc,
        "dictionary._weights": d.w_dec, "dictionary.multiplier": np.zeros((), np.float32),
    }  # fmt: skip
    save_file(state, tmp_path / "o.safetensors")
    with caplog.at_level("INFO"):
        found = read_dictionary(tmp_path / "o.safetensors", Overrides(kind="topk", k=3))
    np.testing.assert_array_equal(found.encode(tokens()), d.encode(tokens()))
    np.testing.assert_allclose(np.linalg.norm(found.w_dec, axis=1), 1, atol=1e-6)
    assert "normalised to length 1, overcomplete's default" in caplog.text
    with pytest.raises(VitseeError, match=r"does not say its kind; give --kind"):
        read_dictionary(tmp_path / "o.safetensors")
    save_file(
        {**state, "thresholds": np.full(K, -3, np.float32)}, tmp_path / "j.safetensors"
    )
    jump = read_dictionary(tmp_path / "j.safetensors")
    assert jump.kind == "jumprelu"
    assert jump.threshold == pytest.approx(np.full(K, np.exp(-3)))


def test_overcomplete_itself(tmp_path: Path) -> None:
    sae = pytest.importorskip("overcomplete.sae", reason="overcomplete is not installed")
    from safetensors.torch import save_model

    torch.manual_seed(0)
    model = sae.TopKSAE(D, K, top_k=3).eval()
    save_model(model, str(tmp_path / "o.safetensors"))
    found = read_dictionary(tmp_path / "o.safetensors", Overrides(kind="topk", k=3))
    with torch.no_grad():
        _, codes, decoded = model(torch.from_numpy(tokens()))
    np.testing.assert_allclose(found.encode(tokens()), codes, atol=1e-5)
    np.testing.assert_allclose(found.decode(found.encode(tokens())), decoded, atol=1e-5)


def test_saev_itself(tmp_path: Path) -> None:
    modeling = pytest.importorskip("saev.nn.modeling", reason="saev is not installed")
    for activation in (
        modeling.TopK(top_k=3),
        modeling.BatchTopK(top_k=3),
        modeling.Relu(),
    ):
        torch.manual_seed(0)
        config = modeling.SparseAutoencoderConfig(
            d_model=D, d_sae=K, activation=activation
        )
        model = modeling.SparseAutoencoder(config).eval()
        if hasattr(model.activation, "threshold"):
            model.activation.threshold += 0.2
        modeling.dump(tmp_path / "sae.pt", model)
        found = read_dictionary(tmp_path / "sae.pt")
        with torch.no_grad():
            out = model(torch.from_numpy(tokens()))
        np.testing.assert_allclose(found.encode(tokens()), out.f_x, atol=1e-5)
        np.testing.assert_allclose(
            found.decode(found.encode(tokens())), out.x_hats[:, -1], atol=1e-5
        )


# ---------------------------------------------------------------- wrong files


def file_of(tmp_path: Path, tensors: dict[str, Array], cfg: Any = None) -> Path:
    save_file(tensors, tmp_path / "d.safetensors")
    if cfg is not None:
        (tmp_path / "cfg.json").write_text(
            cfg if isinstance(cfg, str) else json.dumps(cfg)
        )
    return tmp_path / "d.safetensors"


GOOD = named(made("relu"))
STANDARD = {"architecture": "standard"}


@pytest.mark.parametrize(
    ("tensors", "cfg", "more", "message"),
    [
        ({"x": np.zeros(3)}, None, {}, r"no dictionary is recognised in its tensors \(x\)"),
        (GOOD, None, {}, "the file does not say its kind; give --kind"),
        (GOOD, None, {"kind": "fancy"}, "no kind of dictionary 'fancy'; expected linear"),
        (GOOD, None, {"kind": "topk"}, "how many directions topk keeps; give --k"),
        (GOOD, None, {"kind": "topk", "k": 9}, "k is 9; expected 1 to 8"),
        (GOOD, None, {"kind": "jumprelu"}, "no threshold for jumprelu; give --threshold"),
        (GOOD, {"architecture": "gated"}, {}, "architecture 'gated' is not supported"),
        (GOOD, STANDARD | {"normalize_activations": "layer_norm"}, {}, "fold it into the weights"),
        (GOOD, "{", {}, "cfg.json is no JSON"),
        (GOOD, "[]", {}, "cfg.json is no configuration; expected a JSON object"),
        ({"W_dec": GOOD["W_dec"]}, STANDARD, {}, "a dictionary of kind relu needs W_enc"),
        (GOOD | {"b_dec": GOOD["b_enc"]}, STANDARD, {}, r"b_dec is \(8,\); expected \(5,\)"),
        (GOOD | {"W_dec": GOOD["b_dec"]}, STANDARD, {}, r"the directions have 1 axes"),
        (GOOD | {"b_enc": GOOD["b_enc"] * np.inf}, STANDARD, {}, "b_enc holds numbers"),
        (
            {"dictionary._weights": GOOD["W_dec"], "encoder.mlp_blocks.0.weight": GOOD["W_dec"]},
            None, {"kind": "relu"}, "encoder with encoder.mlp_blocks.0.weight is not supported",
        ),
    ],
)  # fmt: skip
def test_wrong_files_are_refused_in_one_line(
    tmp_path: Path,
    tensors: dict[str, Array],
    cfg: Any,
    more: dict[str, Any],
    message: str,
) -> None:
    path = file_of(tmp_path, tensors, cfg)
    with pytest.raises(VitseeError, match=message) as error:
        read_dictionary(path, Overrides(**more))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("d.safetensors", b"not one", "is no .safetensors file"),
        ("d.pt", b"not one", "is no file of tensors"),
        ("d.pt", b'{"cfg": {}}\nnot one', "is no file of tensors"),
        ("missing.pt", None, "cannot read"),
    ],
)
def test_damaged_files(
    tmp_path: Path, name: str, data: bytes | None, message: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(VitseeError, match=message):
        read_dictionary(tmp_path / name)
