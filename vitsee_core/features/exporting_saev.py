"""Tokens of several sites as activation shards of saev (protocol 2.1), to train autoencoders on.

    FOLDER/saev/shards/HASH/
        metadata.json    what the activations are, in the fields of saev's `Metadata`
        shards.json      the files, and the number of images in each
        acts000000.bin   float32 (images, layers, tokens, dim) in C order, class token first
        vitsee.json      whose images and sites these are; saev does not read it

Where saev's text and its code differ, the code decides: it names the fields; HASH is 8 digits of
the fields in their order; the last file is as long as the others, zeros behind its images, because
readers map every file in the full shape.

Source: https://github.com/OSU-NLP-Group/saev, docs/src/developers/protocol.md, src/saev/data.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.tables.files import check_output_path, remove_leftovers, temporary_path
from vitsee_core.tables.formats import plain_json
from vitsee_stores.errors import SiteError, VitseeError, reason
from vitsee_stores.weights_names import weights_name

if TYPE_CHECKING:
    from vitsee_stores import Slab, Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

PROTOCOL = "2.1"
TOKENS_PER_SHARD = 2_400_000  # saev's default
# saev admits its own wrappers of models only; its loaders do not look at it.
FAMILY = "clip"
TOKENS = ("all", "patches")


def export_saev(
    store: Store,
    sites: Sequence[str],
    folder: Path,
    *,
    tokens: str | None = None,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    force: bool = False,
    execution: Execution = DEFAULT,
) -> Path:
    """Write tokens of sites as activation shards.

    Memory is that of a slab of one site per job.

    Args:
        sites: its sites, or selectors; all with the same tokens and channels.
        folder: where `saev/shards/HASH` is created, or a folder that ends in `saev/shards`.
        tokens: "all" (the class token, if there is one, and the patches) or "patches". Registers
            are left out.
        tokens_per_shard: the most tokens in a file, over all layers.
        force: replace an existing export of the same name.
        execution: which images.

    Returns:
        the folder with the shards.

    Raises:
        SiteError: no such site or tokens, sites of different shapes or without a grid.
        MissingInput: a site is stored pooled only.
        VitseeError: less than an image per file, or a folder that exists or cannot be written.
    """
    if tokens not in (None, *TOKENS):
        raise SiteError(
            f"--tokens {tokens} with --format saev; expected {' or '.join(TOKENS)}"
        )
    layers = [choose_features(store, site, "all") for site in store.select(list(sites))]
    layout = _common_layout(layers)
    with_cls = layout.cls is not None and tokens != "patches"
    n_tokens = layout.n_body + with_cls  # the format has no place for registers
    left_out = [kind for kind in layout.prefix if not (with_cls and kind == "cls")]
    if left_out:
        names = ", ".join(left_out)
        log.info("%s: saev has no place for %s: left out", store.label, names)
    rows = execution.rows(store)
    n_images = int((rows.mask & store.valid).sum())
    # saev counts the tokens of a file over all of its layers.
    tokens_per_image = n_tokens * len(layers)
    images_per_shard = min(n_images, tokens_per_shard // tokens_per_image)
    if images_per_shard < 1:
        raise VitseeError(
            f"an image has {tokens_per_image} tokens; {tokens_per_shard} tokens per file "
            "are less than one image"
        )
    metadata = {
        "family": FAMILY,
        "ckpt": store.manifest.model.get("name", "") or store.label,
        "layers": _layer_numbers(layers),
        "content_tokens_per_example": layout.n_body,
        "cls_token": with_cls,
        "d_model": layers[0].dim,
        "n_examples": n_images,
        "max_tokens_per_shard": images_per_shard * tokens_per_image,
        "data": "",  # a pickle in saev, for its pictures
        "dataset": _image_folder(store),
        "pixel_agg": "majority",
        "dtype": "float32",
        "protocol": PROTOCOL,
    }
    target = _shard_folder(folder, metadata)
    _write_folder(
        target,
        store,
        layers,
        rows=rows,
        metadata=metadata,
        shard_shape=(images_per_shard, len(layers), n_tokens, layers[0].dim),
        force=force,
        execution=execution,
    )
    return target


def _common_layout(layers: Sequence[SiteFeatures]) -> TokenLayout:
    """Return the token layout of sites, which must not differ in their tokens or channels.

    Raises:
        SiteError: a site without a grid, or of another shape than the first one.
    """
    first = layers[0]
    first_tokens = [token.name for token in first.tokens]
    for features in layers:
        layout = features.site.layout
        if layout is None or layout.grid is None:
            raise SiteError(
                f"{features.site.name} has no grid of patches; expected sites such as "
                "blocks"
            )
        tokens = [token.name for token in features.tokens]
        if features.dim != first.dim or tokens != first_tokens:
            raise SiteError(
                f"{first.site.name} has {len(first.tokens)} tokens x {first.dim} channels "
                f"and {features.site.name} {len(features.tokens)} x {features.dim}; "
                "expected sites of one shape"
            )
    assert first.site.layout is not None
    return first.site.layout


def _layer_numbers(layers: Sequence[SiteFeatures]) -> list[int]:
    """Return saev's number of each layer.

    Outputs of blocks (`out`) are numbered as the blocks are, other sites in their order.
    """
    if all(features.site.part == "out" for features in layers):
        # Depth 0 is the embedding before block 0.
        return [features.site.depth - 1 for features in layers]
    return list(range(len(layers)))


def _image_folder(store: Store) -> str:
    """Return the path of the folder of images, or "." if there is none on this machine."""
    data = store.manifest.info.get("data", {}).get("data", "")
    if isinstance(data, str) and data:
        folder = Path(data).expanduser()
        if folder.is_dir():
            return str(folder.resolve())
    # saev would read "" as ".", and hash it as that.
    return "."


def _shard_folder(folder: Path, metadata: dict[str, Any]) -> Path:
    """Return `saev/shards/HASH` below a folder, with saev's hash of its metadata."""
    root = folder.resolve()
    if root.parts[-2:] != ("saev", "shards"):
        root = root / "saev" / "shards"
    # Without blanks and in the fields' order, as saev writes it before hashing.
    text = json.dumps(metadata, separators=(",", ":"), ensure_ascii=False)
    return root / hashlib.sha256(text.encode()).hexdigest()[:8]


def _write_shards(
    store: Store,
    layers: Sequence[SiteFeatures],
    folder: Path,
    *,
    rows: Rows,
    shard_shape: tuple[int, int, int, int],
    with_cls: bool,
    execution: Execution,
) -> list[dict[str, Any]]:
    """Write the files of numbers to a folder and return their names and numbers of images.

    Args:
        store: the store.
        layers: the features of each layer.
        folder: an empty folder.
        rows: the images; unreadable ones are left out.
        shard_shape: (images, layers, tokens, dim) of each file.
        with_cls: whether the class token comes before the patches.
        execution: parallel work and progress.
    """
    mask = rows.mask & store.valid
    n_images = int(mask.sum())
    shards: list[np.memmap[Any, np.dtype[np.float32]]] = []
    shard_list = []
    for start in range(0, n_images, shard_shape[0]):
        name = f"acts{len(shards):06d}.bin"
        shards.append(np.memmap(folder / name, "<f4", "w+", shape=shard_shape))
        n_examples = min(shard_shape[0], n_images - start)
        shard_list.append({"name": name, "n_examples": n_examples})
    # Row of the store -> number of the image in the export.
    example_of_row = np.cumsum(mask) - 1
    work = partial(_write_slab, layers, with_cls, shards, example_of_row)
    # Each job holds a slab of one layer.
    jobs = max(1, min(execution.jobs, execution.budget // layers[0].slab_bytes))
    with counting(execution.progress, n_images):
        slabs = each_slab(store, work, rows=rows, jobs=jobs, progress=execution.progress)
        for _ in slabs:
            pass
    for shard in shards:
        # A full disk is found here, not at the rename.
        shard.flush()
    return shard_list


def _write_folder(
    target: Path,
    store: Store,
    layers: Sequence[SiteFeatures],
    *,
    rows: Rows,
    metadata: dict[str, Any],
    shard_shape: tuple[int, int, int, int],
    force: bool,
    execution: Execution,
) -> None:
    """Write the folder of an export under a temporary name, and rename it at the end.

    A killed export leaves nothing that looks complete, and one that is replaced stays until then.

    Args:
        target: the folder.
        store: the store.
        layers: the features of each layer.
        rows: the images; unreadable ones are left out.
        metadata: saev's metadata.
        shard_shape: (images, layers, tokens, dim) of each file.
        force: whether to replace an existing folder.
        execution: parallel work and progress.

    Raises:
        VitseeError: the folder exists, or the disk refuses a file.
    """
    check_output_path(target)
    if target.exists() and not force:
        raise VitseeError(
            f"{target} exists; give another folder, or --force to replace it"
        )
    with_cls = metadata["cls_token"]
    layout = layers[0].site.layout
    assert layout is not None
    mask = rows.mask & store.valid
    provenance = {
        "store": store.label,
        "store_id": store.manifest.store_id,
        "weights": weights_name(store.manifest.model),
        "sites": [features.site.name for features in layers],
        "tokens": ["cls", "patches"] if with_cls else ["patches"],
        "grid": list(layout.grid or ()),
        "rows": rows.describe(),
        "images": store.samples.id[mask].tolist(),
        "labels": store.samples.label[mask].tolist(),
    }
    remove_leftovers(target.parent)
    temporary = temporary_path(target)
    try:
        temporary.mkdir(parents=True)
        shard_list = _write_shards(
            store,
            layers,
            temporary,
            rows=rows,
            shard_shape=shard_shape,
            with_cls=with_cls,
            execution=execution,
        )
        _write_json(temporary / "metadata.json", metadata)
        _write_json(temporary / "shards.json", shard_list)
        _write_json(temporary / "vitsee.json", provenance)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except OSError as error:
        raise VitseeError(f"cannot write {target}: {reason(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_json(path: Path, content: Any) -> None:
    """Write content as indented JSON with a line break at the end."""
    text = json.dumps(plain_json(content), indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def _write_slab(
    layers: Sequence[SiteFeatures],
    with_cls: bool,
    shards: Sequence[NDArray[np.float32]],
    example_of_row: NDArray[np.int64],
    slab: Slab,
) -> None:
    """Copy the tokens of a slab into the shards, layer by layer.

    Args:
        layers: the features of each layer.
        with_cls: whether the class token comes before the patches.
        shards: (images, layers, tokens, dim) each, mapped files.
        example_of_row: (rows of the store,) number of the image in the export.
        slab: the slab.
    """
    examples = example_of_row[slab.rows][slab.valid]
    shard_index, row_in_shard = np.divmod(examples, len(shards[0]))
    # One layer at a time, so that the memory is that of a slab of one site.
    for layer, features in enumerate(layers):
        x = features.of_slab(
            slab, slice(0, len(features.tokens))
        )  # (images, tokens, dim)
        layout = features.site.layout
        assert layout is not None
        for k in np.unique(shard_index):
            in_shard = shard_index == k
            # A slab's images are consecutive, so that a slice of the map takes them all.
            shard_rows = row_in_shard[in_shard]
            target = shards[k][shard_rows[0] : shard_rows[-1] + 1, layer]
            target[:, int(with_cls) :] = x[in_shard, layout.n_prefix :]
            if with_cls:
                target[:, 0] = x[in_shard, layout.cls]
