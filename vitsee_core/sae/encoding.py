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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.progress import Progress, counting
from vitsee_core.runtime.versions import result_versions
from vitsee_core.sae.dictionary import Dictionary, explained
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.results import Table
from vitsee_core.types import Float32
from vitsee_stores import Slab, Store, StoreWriter, open_store, remove_store
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.layout import SiteSpec, StorePlan
from vitsee_stores.manifest import Manifest, new_manifest
from vitsee_stores.samples import Samples
from vitsee_stores.url import Place

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

# Codes of a slab in float32: K is often 10 or 100 times D, so that slabs of tokens are divided.
MAX_CODES_BYTES = 256 << 20
# Bounds the codes and reconstructions that are on the device at once.
TOKENS_PER_BATCH = 4096
COLUMNS = (*SITE, "metric", "value", "n_images")
# Entries of the manifest that are copied: those about images, so that pictures are found again.
KEPT_INFO = (
    "data",
    "data_folder",
    "selection",
    "first_images",
    "first_images_sha256",
    "columns",
)
# Entries of the identity that are not copied: a store of codes has no such arrays.
DROPPED = ("attention", "residual", "inputs", "grams", "erf", "head_weights")


@dataclass
class CodeSums:
    """Sums over tokens and their reconstructions, which slabs add to.

    Attributes:
        n: the number of tokens.
        nonzero: the number of codes that are not 0.
        sum_squared_error: the sum of |x - x'|^2.
        sum_squares: the sum of |x|^2.
        sum_x: (D,) the sum of x.
        active: (K,) whether any token has the direction.
    """

    n: int = 0
    nonzero: int = 0
    sum_squared_error: float = 0.0
    sum_squares: float = 0.0
    # Without axes until the first tokens are added, whose width they take.
    sum_x: NDArray[Any] = field(default_factory=lambda: np.zeros(()))
    active: NDArray[Any] = field(default_factory=lambda: np.zeros((), bool))

    def add(self, x: Float32, codes: Float32, decoded: Float32) -> None:
        """Add tokens, their codes (n, K) and the reconstructions (n, D).

        x: (n, D) what the dictionary reconstructs (`Dictionary.target`).
        """
        x64 = x.astype(np.float64)  # r2 is a difference of these sums
        self.n += len(x)
        self.nonzero += int(np.count_nonzero(codes))
        self.sum_squared_error += float(((x64 - decoded) ** 2).sum())
        self.sum_squares += float((x64**2).sum())
        self.sum_x = self.sum_x + x64.sum(0)
        self.active = self.active | (codes != 0).any(0)

    def metrics(self) -> dict[str, float]:
        """Return r2, l0 and never_active.

        l0 is the mean number of codes of a token that are not 0; never_active is the fraction of
        directions that no token has.
        """
        l0 = self.nonzero / self.n if self.n else math.nan
        r2 = explained(self.n, self.sum_squared_error, self.sum_squares, self.sum_x)
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

    Memory holds a slab of each site and its codes twice, at most `MAX_CODES_BYTES` each time (or
    the codes of a single image).

    Args:
        store: a store with all tokens of these sites.
        dictionaries: site -> dictionary.
        output: the store to fill; an interrupted one is completed.
        names: site -> the dictionary's name in the column `weights`.
        dtype: the type of the stored codes of tokens, "float32" or "float16".
        force: whether an existing store is removed first.
        command: for the store's provenance.

    Returns:
        The store of codes, and a table with a row for each site and metric: `r2`, `l0` and
        `never_active`.

    Raises:
        SiteError: no such site.
        MissingInput: a site is stored pooled only.
        VitseeError: a dictionary of another width, too little memory, or numbers beyond `dtype`.
        StoreError: there is another store at `output`, or it cannot be written.
    """
    from vitsee_core.runtime.device import resolve_device

    # Widths and memory are checked before the output is touched.
    encodings: dict[str, _Encoding] = {}
    for name, dictionary in dictionaries.items():
        (site,) = store.select([name])
        features = choose_features(store, site, "all")
        if features.dim != dictionary.dim:
            raise SiteError(
                f"the dictionary has {dictionary.dim} channels and {name} of "
                f"{store.label} {features.dim}; expected one that was fitted on this site"
            )
        encodings[site.name] = _Encoding(
            site=replace(site, alias_of=None), features=features, dictionary=dictionary
        )
    code_sites = tuple(encoding.code_site(dtype) for encoding in encodings.values())
    plan = _plan_of_codes(store, code_sites)
    all_features = [encoding.features for encoding in encodings.values()]
    _check_memory(store, plan, all_features, execution)
    device = str(resolve_device(execution.device))
    if force:
        remove_store(output)
    manifest, samples = _manifest_of_codes(
        store, plan, dictionaries, names=names or {}, dtype=dtype, command=command
    )
    writer = StoreWriter.create_or_join(output, manifest, samples)
    sums = _write_codes(
        store,
        encodings,
        writer,
        device=device,
        command=command,
        progress=execution.progress,
    )
    writer.finish()
    rows_of_table = []
    for name, encoding in encodings.items():
        for metric, value in sums[name].metrics().items():
            row = site_columns(store, encoding.site)
            row.update(metric=metric, value=value, n_images=int(store.valid.sum()))
            rows_of_table.append(row)
    notes: dict[str, Any] = {"codes": str(output), "store": store.label}
    notes["dictionaries"] = dict(names or {})
    return open_store(output), Table.from_rows(rows_of_table, COLUMNS, notes)


class _Encoding(NamedTuple):
    """A site, its features, and the dictionary that encodes them."""

    site: SiteSpec
    features: SiteFeatures
    dictionary: Dictionary

    def code_site(self, dtype: str) -> SiteSpec:
        """Return the site of the codes: that of the tokens, with directions as channels."""
        # The same tokens at the same positions: only the channels are others.
        layout = self.features.layout
        n_directions = self.dictionary.n
        site = replace(
            self.site, dim=n_directions, tokens="all", site_path=None, layout=layout
        )
        if layout is None:
            return replace(site, kind="vector", shape=(n_directions,), dtype="float32")
        return replace(site, shape=(layout.n_tokens, n_directions), dtype=dtype)


def _write_codes(
    store: Store,
    encodings: Mapping[str, _Encoding],
    writer: StoreWriter,
    *,
    device: str,
    command: str,
    progress: Progress,
) -> dict[str, CodeSums]:
    """Write the slabs of codes that are missing, and return site -> its sums over all images.

    Args:
        store: the store of tokens.
        encodings: site -> its features and dictionary.
        writer: the store of codes.
        device: where codes are computed.
        command: the command, for the slabs' provenance.
        progress: advanced by images.

    Raises:
        VitseeError: a code is beyond the stored type.
    """
    sums = {name: CodeSums() for name in encodings}
    missing = ~writer.committed()  # (slabs,)
    with counting(progress, store.n_images, "images"):
        for slab in store.slabs():
            # site -> (valid images, tokens, D), read once for all slabs of codes in it
            tokens = {}
            for name, encoding in encodings.items():
                features = encoding.features
                tokens[name] = features.of_slab(slab, slice(0, len(features.tokens)))
            for k, rows, among_valid in _code_slabs(slab, writer.plan):
                arrays = _image_arrays(store, rows)
                for site in writer.plan.sites:
                    # Committed slabs are encoded too, since the metrics are over all images.
                    codes = _encode_and_add(
                        encodings[site.name].dictionary,
                        tokens[site.name][among_valid],
                        sums[site.name],
                        device,
                    )
                    if missing[k]:
                        arrays |= _code_arrays(site, codes, store.valid[rows])
                if missing[k]:
                    writer.write_slab(k, arrays, {"command": command})
                progress.advance(rows.stop - rows.start)
    return sums


def _plan_of_codes(store: Store, sites: tuple[SiteSpec, ...]) -> StorePlan:
    """Return the plan of a store of codes.

    Its slabs divide those of the store, so that each of these is read once, and have at most
    `MAX_CODES_BYTES` of codes, or a single image.
    """
    image_bytes = 4 * sum(math.prod(site.shape) for site in sites)
    max_images = max(1, MAX_CODES_BYTES // image_bytes)
    plan = store.plan
    # The largest divisor of the store's slab that is small enough.
    slab = max(n for n in range(1, min(max_images, plan.slab) + 1) if plan.slab % n == 0)
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
    """Raise VitseeError if a slab of tokens and its codes exceed the memory."""
    code_bytes = 4 * sum(math.prod(site.shape) for site in plan.sites) * plan.slab
    # Codes in float32, and as they are stored.
    needed = 2 * code_bytes + sum(tokens.slab_bytes for tokens in features)
    if needed > execution.budget:
        raise VitseeError(
            f"encoding {store.label} takes {human_bytes(needed)} of memory; --memory is "
            f"{human_bytes(execution.budget)}"
        )


def _manifest_of_codes(
    store: Store,
    plan: StorePlan,
    dictionaries: Mapping[str, Dictionary],
    *,
    names: Mapping[str, str],
    dtype: str,
    command: str,
) -> tuple[Manifest, Samples]:
    """Return the manifest and the samples of a store of codes.

    The identity has digests of the dictionaries, so that an interrupted store is not completed with
    others.
    """
    manifest = store.manifest
    identity = {
        name: value for name, value in manifest.identity.items() if name not in DROPPED
    }
    identity |= {
        "command": "encode",
        "of": manifest.store_id,
        # Other weights than the model's, so that `vitsee extract` does not add its sites here.
        "weights": f"codes of {manifest.identity.get('weights', '')}",
        "sites": [site.name for site in plan.sites],
        "tokens": {"default": "all"},
        "dictionaries": {
            name: _digest(dictionary) for name, dictionary in dictionaries.items()
        },
        "dtype": {"default": dtype},
        "slab": plan.slab,
        "codec": plan.codec,
    }
    # Each file is named once, in the order of the sites.
    codes = ", ".join(dict.fromkeys(names.values())) or "a dictionary"
    info = {name: manifest.info[name] for name in KEPT_INFO if name in manifest.info}
    samples = Samples(
        index=store.samples.index,
        ids=store.samples.id.tolist(),
        labels=store.samples.label,
        splits=store.samples.split.tolist(),
        boxes=store.samples.box,
    )
    code_manifest = new_manifest(
        identity,
        plan,
        samples,
        model={**manifest.model, "codes": codes},
        transform=manifest.transform,
        class_names=manifest.class_names,
        info={**info, "command": command, "versions": result_versions()},
    )
    return code_manifest, samples


def _digest(dictionary: Dictionary) -> str:
    """Return the SHA-256 of a dictionary's fields."""
    fields = vars(dictionary)
    digest = hashlib.sha256()
    # In the order of names, so that a reordered class has the same digest.
    for name in sorted(fields):
        value = fields[name]
        digest.update(f"{name} ".encode())
        if isinstance(value, np.ndarray):
            digest.update(value.tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def _code_slabs(slab: Slab, plan: StorePlan) -> Iterator[tuple[int, slice, slice]]:
    """Yield the slabs of codes that lie in a slab of tokens.

    Each is given by its number, its rows in the store, and the range of its images among the valid
    images of the slab of tokens.
    """
    # (images + 1,) entry i: the valid images before image i of the slab
    n_valid_before = np.concatenate([[0], np.cumsum(slab.valid)])
    first_row = slab.rows.start
    for start in range(first_row, slab.rows.stop, plan.slab):
        stop = min(start + plan.slab, slab.rows.stop)
        first = int(n_valid_before[start - first_row])
        last = int(n_valid_before[stop - first_row])
        yield start // plan.slab, slice(start, stop), slice(first, last)


def _image_arrays(store: Store, rows: slice) -> dict[str, NDArray[Any]]:
    """Return the arrays about images, array name -> values, which are the same as in the store."""
    arrays: dict[str, NDArray[Any]] = {}
    if store.plan.clip is not None:
        arrays["seconds"] = store.array("seconds")[rows]
    pixel_hash = store.samples.pixel_hash
    if pixel_hash is not None:
        arrays["pixel_hash"] = pixel_hash[rows].astype(np.uint64)
    valid = store.valid[rows]
    arrays["valid"] = valid.astype(np.uint8)
    arrays["n_valid"] = np.array(valid.sum(), np.int64)
    arrays["hash"] = store.samples.hash[rows].astype(np.uint64)
    arrays["size"] = store.samples.size[rows].astype(np.int32)
    return arrays


def _encode_and_add(
    dictionary: Dictionary, tokens: Float32, sums: CodeSums, device: str
) -> Float32:
    """Return the codes (images, tokens, K) of (images, tokens, D), and add them to `sums`."""
    flat = tokens.reshape(-1, tokens.shape[-1])  # (images x tokens, D)
    codes = np.empty((len(flat), dictionary.n), np.float32)
    for start in range(0, len(flat), TOKENS_PER_BATCH):
        x = flat[start : start + TOKENS_PER_BATCH]
        batch_codes = codes[start : start + TOKENS_PER_BATCH]
        batch_codes[...] = dictionary.encode(x, device)
        sums.add(dictionary.target(x), batch_codes, dictionary.decode(batch_codes))
    return codes.reshape(*tokens.shape[:2], dictionary.n)


def _code_arrays(
    site: SiteSpec, codes: Float32, valid: NDArray[np.bool_]
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a site in a slab, array name -> values.

    Args:
        site: the site of codes.
        codes: (valid images, tokens, K).
        valid: (images,) which images could be read; the others have NaN.

    Raises:
        VitseeError: a code is beyond the stored type.
    """
    layout = site.layout
    if layout is None:
        return {f"vectors/{site.name}": _with_invalid(codes[:, 0], valid, "float32")}
    # Overflow is looked for in the next lines, with a message that names the site.
    with np.errstate(over="ignore"):
        stored = codes.astype(site.dtype)
    if not np.isfinite(stored).all():
        raise VitseeError(
            f"codes of {site.name} are up to {np.abs(codes).max():.3g}, beyond "
            f"{site.dtype}; give --dtype float32"
        )
    body = stored[:, layout.n_prefix :]
    # From the codes in float32, not from those that were rounded for the store.
    mean = codes[:, layout.n_prefix :].mean(1, dtype=np.float64)
    arrays = {f"pooled/{site.name}/mean": _with_invalid(mean, valid, "float32")}
    if layout.grid is None:
        arrays[f"acts/{site.name}/rows"] = _with_invalid(body, valid, site.dtype)
    else:
        body = body.reshape(len(body), *layout.body, site.dim)
        arrays[f"acts/{site.name}/grid"] = _with_invalid(body, valid, site.dtype)
    if layout.prefix:
        prefix = stored[:, : layout.n_prefix]
        arrays[f"acts/{site.name}/prefix"] = _with_invalid(prefix, valid, site.dtype)
    cls_tokens = list(layout.cls_tokens)
    if cls_tokens:
        # Models with a class and a distillation token have the mean of both.
        cls_mean = codes[:, cls_tokens].mean(1, dtype=np.float64)
        arrays[f"pooled/{site.name}/cls"] = _with_invalid(cls_mean, valid, "float32")
    return arrays


def _with_invalid(
    values: NDArray[Any], valid: NDArray[np.bool_], dtype: DTypeLike
) -> NDArray[Any]:
    """Return (images, ...) from the values of the valid images, with NaN for the others."""
    all_values = np.full((len(valid), *values.shape[1:]), np.nan, dtype)
    all_values[valid] = values
    return all_values
