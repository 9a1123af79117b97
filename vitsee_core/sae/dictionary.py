"""A dictionary: directions in a site's channels, how a token becomes a code over them, and the
files of trainers that hold one.

h = (x - b_dec) W_enc + b_enc    x alone where `centre` is off
z = code of h, by kind           (tokens, K)
x' = z W_dec + b_dec             (tokens, D)

linear     z = h
relu       z = max(h, 0)
topk       the k largest h, max(h, 0) of them if `positive`; of equal h any (Gao et al. 2024)
batchtopk  h where h > max(threshold, 0), one number from training, as at inference (Bussmann et
           al. 2024)
jumprelu   h where h > max(threshold, 0), a number for each direction (Rajamanoharan et al. 2024)
nearest    1 at the nearest row of W_dec, else 0: k-means; has no encoder
nnls       z >= 0 with the least |x - z W_dec| for x >= 0: non-negative matrix factorisation; has
           no encoder, and no b_dec

Files are recognised by the names of their tensors:

    saev          W_enc (D, K), b_enc, W_dec (K, D), b_dec, activation.threshold; its own file is a
                  line of JSON with the configuration, then torch.save; x is not centred, and topk
                  keeps negative numbers
    SAELens       the same names without `activation.`, and cfg.json beside the file: architecture,
                  k, apply_b_dec_to_input, rescale_acts_by_decoder_norm
    overcomplete  encoder.final_block.0.weight (K, D) and bias, or encoder.weight, encoder.bias;
                  dictionary._weights, dictionary.multiplier, thresholds (logarithms)
    vitsee        `vitsee concepts --save`: names as saev's, the rest in the file's metadata

What a file does not say must be given, or is assumed, which is logged. No code of a file is run.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.tables.files import new_files
from vitsee_core.types import Float, Float32
from vitsee_stores.errors import SiteError, VitseeError, reason

if TYPE_CHECKING:
    import torch

    from vitsee_stores import Store

log = logging.getLogger(__name__)

ENCODED = (
    "linear",
    "relu",
    "topk",
    "batchtopk",
    "jumprelu",
)  # kinds with W_enc and b_enc
KINDS = (*ENCODED, "nearest", "nnls")
NNLS_STEPS = 500
NNLS_TOLERANCE = 1e-7
FORMAT = "vitsee-dictionary"
CONFIG = "cfg.json"
SAVED = ("kind", "k", "centre", "positive", "clamp", "site")  # fields in the metadata
_SAEV_KINDS = {"Relu": "relu", "TopK": "topk", "BatchTopK": "batchtopk"}
_SAELENS_KINDS = {"standard": "relu", "topk": "topk", "jumprelu": "jumprelu"}
Tensors = dict[str, Float32]
Told = dict[str, Any]  # fields of `Dictionary` that a file tells


@dataclass(frozen=True)
class Dictionary:
    """Directions and their encoder, float32.

    Attributes:
        kind: one of `KINDS`.
        w_dec: (K, D).
        b_dec: (D,).
        w_enc: (D, K), for the kinds that have an encoder.
        b_enc: (K,).
        threshold: (K,), of batchtopk and jumprelu.
        k: of topk.
        centre: whether b_dec is subtracted before encoding.
        positive: whether topk sets negative numbers among the k largest to 0.
        clamp: whether negative numbers of x are set to 0 first; x' is then compared with that.
        site: the site it was fitted on, "" if unknown.
    """

    kind: str
    w_dec: Float32
    b_dec: Float32
    w_enc: Float32 | None = None
    b_enc: Float32 | None = None
    threshold: Float32 | None = None
    k: int | None = None
    centre: bool = False
    positive: bool = True
    clamp: bool = False
    site: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise VitseeError(
                f"no kind of dictionary {self.kind!r}; expected {', '.join(KINDS)}"
            )
        if self.w_dec.ndim != 2:
            raise VitseeError(
                f"the directions have {self.w_dec.ndim} axes; expected (K, channels)"
            )
        n, dim = self.w_dec.shape
        shapes: dict[str, tuple[Float32 | None, tuple[int, ...]]] = {
            "W_dec": (self.w_dec, (n, dim)),
            "b_dec": (self.b_dec, (dim,)),
        }
        if self.kind in ENCODED:
            shapes |= {"W_enc": (self.w_enc, (dim, n)), "b_enc": (self.b_enc, (n,))}
        if self.kind in ("batchtopk", "jumprelu"):
            shapes |= {"threshold": (self.threshold, (n,))}
        for name, (values, shape) in shapes.items():
            if values is None:
                raise VitseeError(f"a dictionary of kind {self.kind} needs {name}")
            if values.shape != shape:
                raise VitseeError(
                    f"{name} is {values.shape}; expected {shape}, W_dec being {n} x {dim}"
                )
            if not np.isfinite(values).all():
                raise VitseeError(f"{name} holds numbers that are not finite")
        if self.kind == "topk" and not (self.k and 1 <= self.k <= n):
            raise VitseeError(
                f"k is {self.k}; expected 1 to {n}, the number of directions"
            )

    @property
    def n(self) -> int:
        """The number of directions."""
        return len(self.w_dec)

    @property
    def dim(self) -> int:
        return self.w_dec.shape[1]

    def target(self, x: Float32) -> Float32:
        """The rows that codes reconstruct, of the shape of x: x, or its non-negative part."""
        return np.maximum(x, 0) if self.clamp else x

    def encode(self, x: Float32, device: str = "cpu") -> Float32:
        """(tokens, K) codes of tokens (tokens, D)."""
        x = self.target(x)
        if self.kind == "nnls":
            return self._nnls(x)
        import torch

        names = ("w_dec", "b_dec", "w_enc", "b_enc", "threshold")
        parts = {
            name: torch.from_numpy(np.ascontiguousarray(values)).to(device)
            for name in names
            if (values := getattr(self, name)) is not None
        }
        with torch.inference_mode():
            tokens = torch.from_numpy(np.ascontiguousarray(x)).to(device)
            return self._codes(tokens, parts).cpu().numpy()

    def decode(self, codes: Float32) -> Float32:
        """The reconstructions (tokens, D) of codes."""
        return codes @ self.w_dec + self.b_dec

    def activation(self, x: Float32, codes: Float32) -> Float32:
        """(tokens, K) how strongly tokens show each direction: their codes; of `nearest` minus the
        squared distance."""
        if self.kind != "nearest":
            return codes
        h = x @ self.w_dec.T - (self.w_dec**2).sum(1) / 2
        return 2 * h - (x**2).sum(1, keepdims=True)

    def _codes(self, x: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        import torch

        if self.kind == "nearest":
            rows = parts["w_dec"]
            h = x @ rows.T - (rows**2).sum(1) / 2
            return torch.zeros_like(h).scatter_(-1, h.argmax(-1, keepdim=True), 1.0)
        if self.centre:
            x = x - parts["b_dec"]
        h = torch.addmm(parts["b_enc"], x, parts["w_enc"])
        if self.kind == "linear":
            return h
        if self.kind == "relu":
            return h.relu_()
        if self.kind == "topk":
            assert self.k is not None
            top = torch.topk(h, self.k, dim=-1, sorted=False)
            values = top.values.relu() if self.positive else top.values
            return torch.zeros_like(h).scatter_(-1, top.indices, values)
        return torch.where(h > parts["threshold"].clamp(min=0), h, 0.0)

    def _nnls(self, x: Float32) -> Float32:
        """scikit-learn's coordinate descent with fixed directions."""
        from sklearn.decomposition import non_negative_factorization
        from sklearn.exceptions import ConvergenceWarning

        if (x < 0).any():
            raise VitseeError(
                f"a token has negative numbers ({x.min():.3g}), and codes of kind nnls are of "
                "tokens without; give --clamp to take them as 0"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return non_negative_factorization(
                x,
                H=self.w_dec,
                n_components=self.n,
                update_H=False,
                tol=NNLS_TOLERANCE,
                max_iter=NNLS_STEPS,
            )[0]


def explained(n: int, error: float, squares: float, total: Float) -> float:
    """1 - |x - x'|^2 / |x - mean|^2, both summed over n tokens and their channels: 1 minus the
    fraction of variance unexplained; NaN where tokens do not vary. From the sums of |x - x'|^2,
    |x|^2 and x (D,)."""
    if not n:
        return np.nan
    spread = squares - float((total**2).sum()) / n
    if spread > 1e-12 * squares:
        return float(1 - error / spread)
    return np.nan


@dataclass(frozen=True)
class Overrides:
    """The user's own statements about a file, which stand in place of what it says itself."""

    kind: str | None = None
    k: int | None = None
    threshold: float | None = None
    centre: bool | None = None
    clamp: bool | None = None


def read_dictionary(path: Path, overrides: Overrides | None = None) -> Dictionary:
    """The dictionary of a .safetensors file, or of a file of torch.save or saev.

    Raises:
        VitseeError: no such file, tensors that are not recognised, missing or of other shapes, a
            trainer's option that is not supported, or something that neither file nor user says.
    """
    tensors, told = _read(path)
    try:
        found = _recognised(path, tensors, told)
        given = {
            name: value
            for name, value in asdict(overrides or Overrides()).items()
            if value is not None
        }
        if "threshold" in given:
            given["threshold"] = np.full(
                len(found["w_dec"]), given["threshold"], np.float32
            )
        found |= given
        if "kind" not in found:
            raise VitseeError(
                f"the file does not say its kind; give --kind {'|'.join(ENCODED)}"
            )
        if found["kind"] == "topk" and found.get("k") is None:
            raise VitseeError(
                "the file does not say how many directions topk keeps; give --k"
            )
        if found["kind"] in ("batchtopk", "jumprelu") and found.get("threshold") is None:
            raise VitseeError(
                f"the file has no threshold for {found['kind']}; give --threshold"
            )
        return Dictionary(**found)
    except VitseeError as error:
        raise VitseeError(f"{path}: {error}") from None


def for_sites(
    store: Store, paths: Sequence[Path], sites: Sequence[str], overrides: Overrides
) -> dict[str, tuple[Dictionary, Path]]:
    """The dictionary of each site, and its file: one for all, or one each in order. sites:
    selectors; without any, the sites that the dictionaries were fitted on.

    Raises:
        SiteError: no such site, or a dictionary that does not say its site.
        VitseeError: other numbers of both, or a file that cannot be used.
    """
    found = [(read_dictionary(path, overrides), path) for path in paths]
    if not sites:
        if unknown := [path for one, path in found if not one.site]:
            raise SiteError(
                f"{unknown[0]} does not say which site it was fitted on; give --sites"
            )
        chosen = [store.site(one.site) for one, _ in found]
    else:
        chosen = store.select(list(sites))
    if len(found) not in (1, len(chosen)):
        raise VitseeError(
            f"{len(found)} dictionaries for {len(chosen)} sites; expected one, or one for each"
        )
    every = found * len(chosen) if len(found) == 1 else found
    return {site.name: one for site, one in zip(chosen, every, strict=True)}


def save_dictionary(dictionary: Dictionary, path: Path, *, force: bool = False) -> None:
    """Write a dictionary as a .safetensors file that `read_dictionary` reads.

    Raises:
        VitseeError: the file exists, or cannot be written.
    """
    from safetensors.numpy import save_file

    names = {
        "W_dec": dictionary.w_dec,
        "b_dec": dictionary.b_dec,
        "W_enc": dictionary.w_enc,
    }
    names |= {"b_enc": dictionary.b_enc, "threshold": dictionary.threshold}
    tensors = {
        name: np.ascontiguousarray(v) for name, v in names.items() if v is not None
    }
    told = {name: getattr(dictionary, name) for name in SAVED}
    with new_files([path], force=force) as (partial,):
        save_file(tensors, partial, {"format": FORMAT, FORMAT: json.dumps(told)})


def _read(path: Path) -> tuple[Tensors, Told]:
    """The tensors of a file in float32, and what its header or the file beside it tells."""
    try:
        with open(path, "rb") as file:
            start = file.read(1)
        if path.suffix == ".safetensors":
            return _safetensors(path)
        return _torch(path, headed=start == b"{")
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None


def _safetensors(path: Path) -> tuple[Tensors, Told]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            told: Told = dict(file.metadata() or {})
            names: list[str] = list(file.keys())
            tensors = {name: file.get_tensor(name).float().numpy() for name in names}
        if FORMAT in told:
            told = {"vitsee": json.loads(told[FORMAT])}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise VitseeError(f"{path} is no .safetensors file: {error}") from None
    beside = path.with_name(CONFIG)
    if "vitsee" not in told and beside.is_file():
        try:
            told = {"cfg": json.loads(beside.read_text(encoding="utf-8"))}
        except (ValueError, OSError) as error:
            raise VitseeError(f"{beside} is no JSON: {error}") from None
        if not isinstance(told["cfg"], dict):
            raise VitseeError(f"{beside} is no configuration; expected a JSON object")
    return tensors, told


def _torch(path: Path, *, headed: bool) -> tuple[Tensors, Told]:
    import torch

    with open(path, "rb") as file:
        try:
            told = {"saev": json.loads(file.readline())} if headed else {}
            found = torch.load(
                io.BytesIO(file.read()), map_location="cpu", weights_only=True
            )
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            text = " ".join(str(error).split())[:100]
            raise VitseeError(f"{path} is no file of tensors: {text}") from None
    if not isinstance(found, dict) or not all(torch.is_tensor(v) for v in found.values()):
        raise VitseeError(f"{path} holds no state dict; expected names and tensors")
    return {name: v.float().numpy() for name, v in found.items()}, told


def _recognised(path: Path, tensors: Tensors, told: Told) -> Told:
    if "dictionary._weights" in tensors:
        return _overcomplete(path, tensors)
    if "W_dec" in tensors:
        return _named(path, tensors, told)
    names = ", ".join([*tensors][:5]) or "nothing"
    raise VitseeError(
        f"no dictionary is recognised in its tensors ({names}); expected W_dec with W_enc, b_enc, "
        "b_dec, or dictionary._weights with encoder..."
    )


def _named(path: Path, tensors: Tensors, told: Told) -> Told:
    """Names as saev, SAELens and vitsee write them."""
    rename = {"W_dec": "w_dec", "b_dec": "b_dec", "W_enc": "w_enc", "b_enc": "b_enc"}
    found: Told = {
        ours: tensors[name] for name, ours in rename.items() if name in tensors
    }
    n, dim = (*found["w_dec"].shape, 0)[:2]
    if "vitsee" in told:
        if not isinstance(told["vitsee"], dict):
            raise VitseeError("its metadata is damaged; expected a JSON object")
        found |= {name: value for name, value in told["vitsee"].items() if name in SAVED}
    elif "saev" in told:
        found |= _of_saev(told["saev"])
    elif "cfg" in told:
        found |= _of_saelens(told["cfg"], found)
    else:
        # saev's state dict without its line of configuration; x is not centred there.
        log.warning(
            "%s: nothing beside the file says how it was trained: x is %s",
            path,
            "not centred (--centre)",
        )
    for name in ("threshold", "activation.threshold", "topk_threshold"):
        if name in tensors:
            own = tensors[name]
            found["threshold"] = np.full(n, own, np.float32) if own.size == 1 else own
            found.setdefault("kind", "jumprelu" if name == "threshold" else "batchtopk")
    if "b_dec" not in found:
        log.info("%s: no b_dec: 0 is assumed", path)
        found["b_dec"] = np.zeros(dim, np.float32)
    if "w_enc" in found and "b_enc" not in found:
        log.info("%s: no b_enc: 0 is assumed", path)
        found["b_enc"] = np.zeros(n, np.float32)
    return found


def _of_saev(header: Told) -> Told:
    activation = header.get("cfg", {}).get("activation", {})
    kind = activation.get("cls")
    given = activation.get("params", {})
    if kind not in _SAEV_KINDS:
        raise VitseeError(
            f"saev's activation {kind!r} is not supported; expected "
            f"{', '.join(_SAEV_KINDS)}"
        )
    return {"kind": _SAEV_KINDS[kind], "k": given.get("top_k"), "positive": False}


def _of_saelens(cfg: Told, found: Told) -> Told:
    kind = cfg.get("architecture", "standard")
    k = cfg.get("k")
    if (
        cfg.get("activation_fn_str", cfg.get("activation_fn")) == "topk"
    ):  # before version 6
        kind = "topk"
        k = (cfg.get("activation_fn_kwargs") or {}).get("k")
    if kind not in _SAELENS_KINDS:
        raise VitseeError(
            f"SAELens' architecture {kind!r} is not supported; expected "
            f"{', '.join(_SAELENS_KINDS)}"
        )
    for name, plain in (
        ("normalize_activations", "none"),
        ("reshape_activations", "none"),
    ):
        if (value := cfg.get(name) or plain) != plain:
            raise VitseeError(
                f"{name} is {value!r}, which is not supported; fold it into the "
                "weights first"
            )
    told: Told = {"kind": _SAELENS_KINDS[kind], "k": k}
    told["centre"] = bool(cfg.get("apply_b_dec_to_input", True))
    if cfg.get("rescale_acts_by_decoder_norm") and "w_enc" in found and "b_enc" in found:
        norms = np.linalg.norm(found["w_dec"], axis=1)  # as SAELens folds them
        told |= {
            "w_enc": found["w_enc"] * norms,
            "b_enc": found["b_enc"] * norms,
            "w_dec": found["w_dec"] / np.maximum(norms, 1e-8)[:, None],
        }
    return told


def _overcomplete(path: Path, tensors: Tensors) -> Told:
    weights = tensors["dictionary._weights"]
    if weights.ndim != 2:
        raise VitseeError(
            f"dictionary._weights is {weights.shape}; expected (K, channels)"
        )
    n, dim = weights.shape
    layer = ("encoder.final_block.0.", "encoder.weight", "encoder.bias")
    if other := [
        x for x in tensors if not x.startswith((*layer, "dictionary.", "thresholds"))
    ]:
        raise VitseeError(
            f"an encoder with {other[0]} is not supported; expected one linear layer"
        )
    log.info(
        "%s: rows of the dictionary are normalised to length 1, overcomplete's default",
        path,
    )
    rows = weights / (np.linalg.norm(weights, axis=1, keepdims=True) + 1e-8)
    rows = rows * np.exp(tensors.get("dictionary.multiplier", np.zeros((), np.float32)))
    linear = {
        kind: tensors.get(f"encoder.final_block.0.{kind}", tensors.get(f"encoder.{kind}"))
        for kind in ("weight", "bias")
    }
    encoder = linear["weight"]
    bias = linear["bias"]
    if encoder is None:
        log.info(
            "%s: no encoder: the dictionary's own rows are taken (tied weights)", path
        )
        encoder = rows
    found: Told = {
        "w_dec": rows.astype(np.float32),
        "b_dec": np.zeros(dim, np.float32),
        "w_enc": encoder.T,
        "b_enc": np.zeros(n, np.float32) if bias is None else bias,
    }
    if "thresholds" in tensors:
        found |= {"kind": "jumprelu", "threshold": np.exp(tensors["thresholds"])}
    return found
