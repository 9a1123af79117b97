"""A store of codes: the tokens of sites of another store, encoded by dictionaries.

An ordinary store with the same images, sites, tokens and places on the image, whose channels are
the directions of the dictionary, so that every analysis reads it. Zeros are stored as they are and
compressed (zstd); FORMAT.md has the sizes. Slabs are parts of the other store's, so that each of
those is read once; whoever repeats an interrupted command writes only what is missing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.versions import result_versions
from vitsee_core.sae.dictionary import Dictionary, explained
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.results import Table
from vitsee_core.types import Float32
from vitsee_stores import Slab, Store, StoreWriter, open_store, remove_store
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.layout import SiteSpec, StorePlan
from vitsee_stores.manifest import new_manifest
from vitsee_stores.samples import Samples
from vitsee_stores.url import Place

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

CODES_BYTES = 256 << 20  # of a slab's codes in float32
AT_ONCE = 4096  # tokens
COLUMNS = (*SITE, "metric", "value", "n_images")
# What the store of codes has of the other's: about images, so that pictures are found again.
KEPT_INFO = (
    "data",
    "data_folder",
    "selection",
    "first_images",
    "first_images_sha256",
    "columns",
)
DROPPED = ("attention", "residual", "inputs", "grams", "erf", "head_weights")  # not in it


@dataclass
class CodeSums:
    """Sums over tokens and their reconstructions, which slabs add to."""

    n: int = 0
    nonzero: int = 0
    error: float = 0.0  # sum of |x - x'|^2
    squares: float = 0.0  # sum of |x|^2
    total: NDArray[Any] = field(default_factory=lambda: np.zeros(()))  # sum of x, (D,)
    active: NDArray[Any] = field(default_factory=lambda: np.zeros((), bool))  # (K,)

    def add(self, x: Float32, codes: Float32, decoded: Float32) -> None:
        """Tokens (n, D) that codes reconstruct, (n, K) and (n, D)."""
        wide = x.astype(np.float64)
        self.n += len(x)
        self.nonzero += int(np.count_nonzero(codes))
        self.error += float(((wide - decoded) ** 2).sum())
        self.squares += float((wide**2).sum())
        self.total = self.total + wide.sum(0)
        self.active = self.active | (codes != 0).any(0)

    def metrics(self) -> dict[str, float]:
        """r2; l0, the mean number of codes of a token that are not 0; never_active, the share of
        directions without one."""
        l0 = self.nonzero / self.n if self.n else math.nan
        r2 = explained(self.n, self.error, self.squares, self.total)
        return {"r2": r2, "l0": l0, "never_active": float(1 - self.active.mean())}


def encode_store(
    store: Store,
    dictionaries: Mapping[str, Dictionary],
    output: Place,
    *,
    names: Mapping[str, str] | None = None,
    dtype: str = "float32",
    force: bool = False,
    command: str = "",
    execution: Execution = DEFAULT,
) -> tuple[Store, Table]:
    """Write the codes of sites as a store, and measure what is lost.

    Memory: a slab of a site, and its codes, at most `CODES_BYTES` twice (or those of one image).

    Args:
        store: with all tokens of these sites.
        dictionaries: by the name of the site.
        output: the store to fill; an interrupted one is completed.
        names: what each dictionary is called in the column `weights`, by site.
        dtype: of the codes of tokens, "float32" or "float16".
        force: start anew.
        command: for the store's provenance.
        execution: device and memory.

    Returns:
        the store, and one row per site and metric: `r2`, `l0` and `never_active`.

    Raises:
        SiteError: no such site.
        MissingInput: a site is stored pooled only.
        VitseeError: a dictionary of another width, too little memory, or numbers beyond `dtype`.
        StoreError: there is another store at `output`, or it cannot be written.
    """
    from vitsee_core.runtime.device import resolve_device

    chosen = {}
    for name, dictionary in dictionaries.items():
        (site,) = store.select([name])
        features = choose_features(store, site, "all")
        if features.dim != dictionary.dim:
            raise SiteError(
                f"the dictionary has {dictionary.dim} channels and {name} of {store.label} "
                f"{features.dim}; expected one that was fitted on this site"
            )
        chosen[site.name] = (replace(site, alias_of=None), features, dictionary)
    sites = tuple(_site(*one, dtype) for one in chosen.values())
    plan = _plan(store, sites)
    _check_memory(
        store, plan, [features for _, features, _ in chosen.values()], execution
    )
    device = str(resolve_device(execution.device))
    if force:
        remove_store(output)
    writer = _writer(store, plan, dictionaries, names or {}, dtype, output, command)
    sums = {name: CodeSums() for name in chosen}
    missing = ~writer.committed()
    with counting(execution.progress, store.n_images, "images"):
        for slab in store.slabs():
            tokens = {
                name: of.of_slab(slab, slice(0, len(of.tokens)))
                for name, (_, of, _) in chosen.items()
            }
            for k, rows, part in _parts(slab, writer.plan):
                arrays = _of_images(store, rows)
                for site in sites:
                    dictionary = dictionaries[site.name]
                    codes = _encode(
                        dictionary, tokens[site.name][part], sums[site.name], device
                    )
                    if missing[k]:
                        arrays |= _arrays(site, codes, store.valid[rows])
                if missing[k]:
                    writer.write_slab(k, arrays, {"command": command})
                execution.progress.advance(rows.stop - rows.start)
    writer.finish()
    n = int(store.valid.sum())
    lines = [
        site_columns(store, spec) | {"metric": metric, "value": value, "n_images": n}
        for name, (spec, _, _) in chosen.items()
        for metric, value in sums[name].metrics().items()
    ]
    made = open_store(output)
    notes = {
        "codes": str(output),
        "store": store.label,
        "dictionaries": dict(names or {}),
    }
    return made, Table.from_rows(lines, COLUMNS, notes)


def _site(
    spec: SiteSpec, features: SiteFeatures, dictionary: Dictionary, dtype: str
) -> SiteSpec:
    """A site of codes in the place of the site."""
    layout = features.layout
    plain = replace(spec, dim=dictionary.n, tokens="all", site_path=None, layout=layout)
    if layout is None:
        return replace(plain, kind="vector", shape=(dictionary.n,), dtype="float32")
    return replace(plain, shape=(layout.n_tokens, dictionary.n), dtype=dtype)


def _plan(store: Store, sites: tuple[SiteSpec, ...]) -> StorePlan:
    """Slabs that divide the store's, with at most `CODES_BYTES` of codes where they are larger than
    an image."""
    of_image = 4 * sum(math.prod(site.shape) for site in sites)
    most = max(1, CODES_BYTES // of_image)
    whole = store.plan.slab
    slab = max(n for n in range(1, min(most, whole) + 1) if whole % n == 0)
    plan = store.plan
    return StorePlan(
        store.n_images,
        slab,
        "zstd",
        sites,
        canvas=plan.canvas,
        clip=plan.clip,
        pixel_hashes=plan.pixel_hashes,
    )


def _check_memory(
    store: Store, plan: StorePlan, features: Sequence[SiteFeatures], execution: Execution
) -> None:
    codes = 4 * sum(math.prod(site.shape) for site in plan.sites) * plan.slab
    need = 2 * codes + sum(of.slab_bytes for of in features)
    if need > execution.budget:
        raise VitseeError(
            f"encoding {store.label} takes {human_bytes(need)} of memory; --memory is "
            f"{human_bytes(execution.budget)}"
        )


def _writer(
    store: Store,
    plan: StorePlan,
    dictionaries: Mapping[str, Dictionary],
    names: Mapping[str, str],
    dtype: str,
    output: Place,
    command: str,
) -> StoreWriter:
    old = store.manifest
    theirs = store.samples
    identity = {
        name: value for name, value in old.identity.items() if name not in DROPPED
    } | {
        "command": "encode",
        "of": old.store_id,
        # so that extract adds nothing
        "weights": f"codes of {old.identity.get('weights', '')}",
        "sites": [site.name for site in plan.sites],
        "tokens": {"default": "all"},
        "dictionaries": {name: _digest(one) for name, one in dictionaries.items()},
        "dtype": {"default": dtype},
        "slab": plan.slab,
        "codec": plan.codec,
    }
    codes = ", ".join(dict.fromkeys(names.values())) or "a dictionary"
    kept = {name: old.info[name] for name in KEPT_INFO if name in old.info}
    samples = Samples(
        theirs.index, theirs.id.tolist(), theirs.label, theirs.split.tolist(), theirs.box
    )
    manifest = new_manifest(
        identity,
        plan,
        samples,
        model={**old.model, "codes": codes},
        transform=old.transform,
        class_names=old.class_names,
        info={**kept, "command": command, "versions": result_versions()},
    )
    return StoreWriter.create_or_join(output, manifest, samples)


def _digest(dictionary: Dictionary) -> str:
    fields = vars(dictionary)
    digest = hashlib.sha256()
    for name in sorted(fields):
        value = fields[name]
        digest.update(f"{name} ".encode())
        digest.update(
            value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
        )
    return digest.hexdigest()


def _parts(slab: Slab, plan: StorePlan) -> Iterator[tuple[int, slice, slice]]:
    """The slabs of codes in a slab: number, rows of the store, places among its valid images."""
    before = np.concatenate([[0], np.cumsum(slab.valid)])
    for start in range(slab.rows.start, slab.rows.stop, plan.slab):
        stop = min(start + plan.slab, slab.rows.stop)
        first, last = (int(before[row - slab.rows.start]) for row in (start, stop))
        yield start // plan.slab, slice(start, stop), slice(first, last)


def _of_images(store: Store, rows: slice) -> dict[str, NDArray[Any]]:
    valid = store.valid[rows]
    seconds = (
        {"seconds": store.array("seconds")[rows]} if store.plan.clip is not None else {}
    )
    pixel_hash = store.samples.pixel_hash
    pixels = (
        {} if pixel_hash is None else {"pixel_hash": pixel_hash[rows].astype(np.uint64)}
    )
    return {
        **seconds,
        **pixels,
        "valid": valid.astype(np.uint8),
        "n_valid": np.array(valid.sum(), np.int64),
        "hash": store.samples.hash[rows].astype(np.uint64),
        "size": store.samples.size[rows].astype(np.int32),
    }


def _encode(
    dictionary: Dictionary, tokens: Float32, sums: CodeSums, device: str
) -> Float32:
    """(images, tokens, K) codes of (images, tokens, D)."""
    flat = tokens.reshape(-1, tokens.shape[-1])
    codes = np.empty((len(flat), dictionary.n), np.float32)
    for start in range(0, len(flat), AT_ONCE):
        x = flat[start : start + AT_ONCE]
        own = codes[start : start + AT_ONCE]
        own[...] = dictionary.encode(x, device)
        sums.add(dictionary.target(x), own, dictionary.decode(own))
    return codes.reshape(*tokens.shape[:2], dictionary.n)


def _arrays(
    site: SiteSpec, codes: Float32, valid: NDArray[np.bool_]
) -> dict[str, NDArray[Any]]:
    """The arrays of one site in a slab, by their names in the store; NaN for images that could not
    be read."""
    layout = site.layout
    if layout is None:
        return {f"vectors/{site.name}": _rows(codes[:, 0], valid, "float32")}
    with np.errstate(over="ignore"):
        stored = codes.astype(site.dtype)
    if not np.isfinite(stored).all():
        raise VitseeError(
            f"codes of {site.name} are up to {np.abs(codes).max():.3g}, beyond {site.dtype}; give "
            "--dtype float32"
        )
    body = stored[:, layout.n_prefix :]
    mean = codes[:, layout.n_prefix :].mean(1, dtype=np.float64)
    found = {f"pooled/{site.name}/mean": _rows(mean, valid, "float32")}
    if layout.grid is None:
        found[f"acts/{site.name}/rows"] = _rows(body, valid, site.dtype)
    else:
        body = body.reshape(len(body), *layout.body, site.dim)
        found[f"acts/{site.name}/grid"] = _rows(body, valid, site.dtype)
    if layout.prefix:
        found[f"acts/{site.name}/prefix"] = _rows(
            stored[:, : layout.n_prefix], valid, site.dtype
        )
    if cls := list(layout.cls_tokens):
        whole = codes[:, cls].mean(1, dtype=np.float64)
        found[f"pooled/{site.name}/cls"] = _rows(whole, valid, "float32")
    return found


def _rows(
    values: NDArray[Any], valid: NDArray[np.bool_], dtype: DTypeLike
) -> NDArray[Any]:
    """(images of the slab, ...) from those of its valid images."""
    whole = np.full((len(valid), *values.shape[1:]), np.nan, dtype)
    whole[valid] = values
    return whole
