"""A dictionary: directions in a site's channels, and how a token becomes a code over them.

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
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.types import Float, Float32
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    import torch

ENCODED = ("linear", "relu", "topk", "batchtopk", "jumprelu")  # kinds with W_enc and b_enc
KINDS = (*ENCODED, "nearest", "nnls")
NNLS_STEPS, NNLS_TOLERANCE = 500, 1e-7


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
            raise VitseeError(f"no kind of dictionary {self.kind!r}; expected {', '.join(KINDS)}")
        if self.w_dec.ndim != 2:
            raise VitseeError(f"the directions have {self.w_dec.ndim} axes; expected (K, channels)")
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
            raise VitseeError(f"k is {self.k}; expected 1 to {n}, the number of directions")

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

        parts = self._tensors(device)
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

    def _tensors(self, device: str) -> dict[str, torch.Tensor]:
        import torch

        names = ("w_dec", "b_dec", "w_enc", "b_enc", "threshold")
        given = {name: getattr(self, name) for name in names}
        return {
            name: torch.from_numpy(np.ascontiguousarray(values)).to(device)
            for name, values in given.items()
            if values is not None
        }

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
                x, H=self.w_dec, n_components=self.n, update_H=False, tol=NNLS_TOLERANCE,
                max_iter=NNLS_STEPS,
            )[0]  # fmt: skip


def explained(n: int, error: float, squares: float, total: Float) -> float:
    """1 - |x - x'|^2 / |x - mean|^2, both summed over n tokens and their channels: 1 minus the
    fraction of variance unexplained; NaN where tokens do not vary. From the sums of |x - x'|^2,
    |x|^2 and x (D,)."""
    if not n:
        return np.nan
    spread = squares - float((total**2).sum()) / n
    return float(1 - error / spread) if spread > 1e-12 * squares else np.nan
