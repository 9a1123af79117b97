"""Dictionaries of sparse autoencoders and the like: how tokens are encoded and decoded.

A dictionary is a set of K directions in a site's D channels, with a rule that encodes a token x as
a code z over them:

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

`dictionary_files.py` reads and writes them.
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


# Kinds with W_enc and b_enc.
ENCODED = ("linear", "relu", "topk", "batchtopk", "jumprelu")
KINDS = (*ENCODED, "nearest", "nnls")
# Passes of coordinate descent, and the relative change that ends them.
NNLS_STEPS = 500
NNLS_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Dictionary:
    """Directions and their encoder, in float32.

    Attributes:
        kind: how a token is encoded, one of `KINDS`.
        w_dec: (K, D) the directions.
        b_dec: (D,) added to reconstructions.
        w_enc: (D, K) encoder weights, for the kinds that have an encoder.
        b_enc: (K,) encoder biases, for the same kinds.
        threshold: (K,) thresholds, for batchtopk and jumprelu.
        k: the number of directions that topk keeps.
        centre: whether b_dec is subtracted before encoding.
        positive: whether topk sets negative numbers among the k largest to 0.
        clamp: whether negative numbers of x are set to 0 first; x' is then compared with that.
        site: the site it was fitted on, "" if unknown.

    Raises:
        VitseeError: an unknown kind, missing arrays, other shapes, numbers that are not finite, or
            a k outside of 1 to K.
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
        """Refuse fields that do not go together."""
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
        """The number of channels."""
        return self.w_dec.shape[1]

    def target(self, x: Float32) -> Float32:
        """Return what codes of x reconstruct: x, or its non-negative part if `clamp` is set."""
        if not self.clamp:
            return x
        return np.maximum(x, 0)

    def encode(self, x: Float32, device: str = "cpu") -> Float32:
        """Return the (tokens, K) codes of tokens (tokens, D)."""
        x = self.target(x)
        if self.kind == "nnls":
            return self._solve_nnls(x)
        # Imported here: dictionaries are read and checked without it.
        import torch

        arrays: dict[str, torch.Tensor] = {}
        for name in ("w_dec", "b_dec", "w_enc", "b_enc", "threshold"):
            values = getattr(self, name)
            if values is not None:
                arrays[name] = torch.from_numpy(np.ascontiguousarray(values)).to(device)
        with torch.inference_mode():
            tokens = torch.from_numpy(np.ascontiguousarray(x)).to(device)
            return self._encode_on_device(tokens, arrays).cpu().numpy()

    def decode(self, codes: Float32) -> Float32:
        """Return the (tokens, D) reconstructions of codes (tokens, K)."""
        return codes @ self.w_dec + self.b_dec

    def activation(self, x: Float32, codes: Float32) -> Float32:
        """Return (tokens, K) how strongly tokens show each direction.

        These are the codes; for `nearest`, whose codes are 0 and 1, minus the squared distances.
        """
        if self.kind != "nearest":
            return codes
        # Larger is nearer: -|x - w|^2 = 2 (x w - |w|^2 / 2) - |x|^2
        h = x @ self.w_dec.T - (self.w_dec**2).sum(1) / 2
        return 2 * h - (x**2).sum(1, keepdims=True)

    def _encode_on_device(
        self, x: torch.Tensor, arrays: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the (tokens, K) codes of tokens; `arrays` has the dictionary's arrays by name."""
        import torch

        if self.kind == "nearest":
            directions = arrays["w_dec"]
            # The nearest direction has the largest x w - |w|^2 / 2, as |x|^2 is the same for all.
            h = x @ directions.T - (directions**2).sum(1) / 2
            return torch.zeros_like(h).scatter_(-1, h.argmax(-1, keepdim=True), 1.0)
        if self.centre:
            x = x - arrays["b_dec"]
        h = torch.addmm(arrays["b_enc"], x, arrays["w_enc"])
        if self.kind == "linear":
            return h
        if self.kind == "relu":
            return h.relu_()
        if self.kind == "topk":
            assert self.k is not None
            # A scatter into zeros, as the K - k other codes are 0.
            top = torch.topk(h, self.k, dim=-1, sorted=False)
            values = top.values.relu() if self.positive else top.values
            return torch.zeros_like(h).scatter_(-1, top.indices, values)
        # batchtopk and jumprelu: h itself above the threshold, not h minus the threshold.
        return torch.where(h > arrays["threshold"].clamp(min=0), h, 0.0)

    def _solve_nnls(self, x: Float32) -> Float32:
        """Return codes z >= 0 with the least |x - z W_dec|.

        scikit-learn's coordinate descent for non-negative factorisation is run with fixed
        directions, as it solves all tokens together.
        """
        from sklearn.decomposition import non_negative_factorization
        from sklearn.exceptions import ConvergenceWarning

        if (x < 0).any():
            raise VitseeError(
                f"a token has negative numbers ({x.min():.3g}), and codes of kind nnls "
                "are of tokens without; give --clamp to take them as 0"
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
    """Return r2 = 1 - |x - x'|^2 / |x - mean|^2, summed over tokens and channels.

    It is 1 minus the fraction of variance unexplained; NaN if the tokens do not vary.

    Args:
        n: the number of tokens.
        error: the sum of |x - x'|^2.
        squares: the sum of |x|^2.
        total: (D,) the sum of x.
    """
    if not n:
        return np.nan
    variation = squares - float((total**2).sum()) / n
    # Below this the difference is rounding error.
    if variation > 1e-12 * squares:
        return float(1 - error / variation)
    return np.nan
