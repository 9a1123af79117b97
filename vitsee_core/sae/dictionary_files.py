"""Files of dictionaries, as the trainers of sparse autoencoders save them.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.sae.dictionary import ENCODED, Dictionary
from vitsee_core.tables.files import new_files
from vitsee_core.types import Float32
from vitsee_stores.errors import SiteError, VitseeError, reason

if TYPE_CHECKING:
    from vitsee_stores import Store

log = logging.getLogger(__name__)

# The key of our metadata in a .safetensors file, and the name of the format.
FORMAT = "vitsee-dictionary"
# SAELens' configuration, beside the file.
CONFIG = "cfg.json"
SAVED = ("kind", "k", "centre", "positive", "clamp", "site")  # fields in the metadata
_SAEV_KINDS = {"Relu": "relu", "TopK": "topk", "BatchTopK": "batchtopk"}
_SAELENS_KINDS = {"standard": "relu", "topk": "topk", "jumprelu": "jumprelu"}
# Settings of SAELens that are refused unless they are "none".
UNSUPPORTED_SETTINGS = ("normalize_activations", "reshape_activations")
Tensors = dict[str, Float32]
# What a file says: its header by its trainer's name ("saev", "cfg", "vitsee"), or fields of
# `Dictionary` by their names.
FileFields = dict[str, Any]


@dataclass(frozen=True)
class Overrides:
    """Fields of a dictionary that the user gives; they replace what the file says.

    Attributes are those of `Dictionary`; None leaves the file's. `threshold` is one number for all
    directions.
    """

    kind: str | None = None
    k: int | None = None
    threshold: float | None = None
    centre: bool | None = None
    clamp: bool | None = None


def read_dictionary(path: Path, overrides: Overrides | None = None) -> Dictionary:
    """Return the dictionary in a .safetensors file, or in a file of torch.save or saev.

    Args:
        path: the file.
        overrides: fields that replace what the file says.

    Raises:
        VitseeError: no such file; tensors that are not recognised, are missing or have other
            shapes; a trainer's option that is not supported; or something that neither the file
            nor the user says.
    """
    tensors, header = _read_tensors(path)
    try:
        fields = _fields_from_tensors(path, tensors, header)
        for name, value in asdict(overrides or Overrides()).items():
            if value is None:
                continue
            if name == "threshold":
                value = np.full(len(fields["w_dec"]), value, np.float32)
            fields[name] = value
        if "kind" not in fields:
            raise VitseeError(
                f"the file does not say its kind; give --kind {'|'.join(ENCODED)}"
            )
        kind = fields["kind"]
        if kind == "topk" and fields.get("k") is None:
            raise VitseeError(
                "the file does not say how many directions topk keeps; give --k"
            )
        if kind in ("batchtopk", "jumprelu") and fields.get("threshold") is None:
            raise VitseeError(f"the file has no threshold for {kind}; give --threshold")
        return Dictionary(**fields)
    except VitseeError as error:
        # Each error above is about this file.
        raise VitseeError(f"{path}: {error}") from None


def for_sites(
    store: Store, paths: Sequence[Path], sites: Sequence[str], overrides: Overrides
) -> dict[str, tuple[Dictionary, Path]]:
    """Return site -> its dictionary and the dictionary's file.

    Args:
        store: the store of the sites.
        paths: a dictionary for all sites, or one for each in order.
        sites: selectors; without any, the sites that the dictionaries were fitted on.
        overrides: fields that replace what the files say.

    Raises:
        SiteError: no such site, or a dictionary that does not say its site.
        VitseeError: different numbers of dictionaries and sites, or a file that cannot be used.
    """
    dictionaries = [(read_dictionary(path, overrides), path) for path in paths]
    if sites:
        chosen = store.select(list(sites))
    else:
        without_site = [path for dictionary, path in dictionaries if not dictionary.site]
        if without_site:
            raise SiteError(
                f"{without_site[0]} does not say which site it was fitted on; give --sites"
            )
        chosen = [store.site(dictionary.site) for dictionary, _ in dictionaries]
    if len(dictionaries) not in (1, len(chosen)):
        raise VitseeError(
            f"{len(dictionaries)} dictionaries for {len(chosen)} sites; expected one, or "
            "one for each"
        )
    if len(dictionaries) == 1:
        dictionaries = dictionaries * len(chosen)
    return {site.name: entry for site, entry in zip(chosen, dictionaries, strict=True)}


def save_dictionary(dictionary: Dictionary, path: Path, *, force: bool = False) -> None:
    """Write a dictionary as a .safetensors file that `read_dictionary` reads.

    Raises:
        VitseeError: the file exists, or cannot be written.
    """
    from safetensors.numpy import save_file

    arrays = {
        "W_dec": dictionary.w_dec,
        "b_dec": dictionary.b_dec,
        "W_enc": dictionary.w_enc,
        "b_enc": dictionary.b_enc,
        "threshold": dictionary.threshold,
    }
    tensors = {
        name: np.ascontiguousarray(values)
        for name, values in arrays.items()
        if values is not None
    }
    fields = {name: getattr(dictionary, name) for name in SAVED}
    with new_files([path], force=force) as (partial,):
        save_file(tensors, partial, {"format": FORMAT, FORMAT: json.dumps(fields)})


def _read_tensors(path: Path) -> tuple[Tensors, FileFields]:
    """Return a file's tensors in float32, and what its header or the file beside it says."""
    try:
        with open(path, "rb") as file:
            first_byte = file.read(1)
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        # saev writes a line of JSON before what torch.save writes.
        return _read_torch_file(path, has_header=first_byte == b"{")
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None


def _read_safetensors(path: Path) -> tuple[Tensors, FileFields]:
    """Return the tensors of a .safetensors file, and our metadata or SAELens' cfg.json beside it.

    It is opened for torch, since NumPy has no bfloat16.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            header: FileFields = dict(file.metadata() or {})
            names: list[str] = list(file.keys())
            tensors = {name: file.get_tensor(name).float().numpy() for name in names}
        if FORMAT in header:
            header = {"vitsee": json.loads(header[FORMAT])}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise VitseeError(f"{path} is no .safetensors file: {error}") from None
    config_path = path.with_name(CONFIG)
    if "vitsee" not in header and config_path.is_file():
        try:
            header = {"cfg": json.loads(config_path.read_text(encoding="utf-8"))}
        except (ValueError, OSError) as error:
            raise VitseeError(f"{config_path} is no JSON: {error}") from None
        if not isinstance(header["cfg"], dict):
            raise VitseeError(
                f"{config_path} is no configuration; expected a JSON object"
            )
    return tensors, header


def _read_torch_file(path: Path, *, has_header: bool) -> tuple[Tensors, FileFields]:
    """Return the state dict of a file of torch.save, and saev's header if there is one.

    Only tensors are unpickled: no code of the file is run.
    """
    import torch

    header: FileFields = {}
    with open(path, "rb") as file:
        try:
            if has_header:
                header["saev"] = json.loads(file.readline())
            state_dict = torch.load(
                io.BytesIO(file.read()), map_location="cpu", weights_only=True
            )
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            text = " ".join(str(error).split())[:100]
            raise VitseeError(f"{path} is no file of tensors: {text}") from None
    is_state_dict = isinstance(state_dict, dict) and all(
        torch.is_tensor(value) for value in state_dict.values()
    )
    if not is_state_dict:
        raise VitseeError(f"{path} holds no state dict; expected names and tensors")
    tensors = {name: value.float().numpy() for name, value in state_dict.items()}
    return tensors, header


def _fields_from_tensors(path: Path, tensors: Tensors, header: FileFields) -> FileFields:
    """Return the fields of `Dictionary` in a file, recognised by its tensors' names."""
    if "dictionary._weights" in tensors:
        return _overcomplete_fields(path, tensors)
    if "W_dec" in tensors:
        return _autoencoder_fields(path, tensors, header)
    names = ", ".join([*tensors][:5]) or "nothing"
    raise VitseeError(
        f"no dictionary is recognised in its tensors ({names}); expected W_dec with "
        "W_enc, b_enc, b_dec, or dictionary._weights with encoder..."
    )


def _autoencoder_fields(path: Path, tensors: Tensors, header: FileFields) -> FileFields:
    """Return the fields of `Dictionary` in a file with the tensor names of saev and SAELens.

    vitsee's own files have them too. Biases that a file lacks are 0, which is logged.

    Args:
        path: the file, for messages.
        tensors: its tensors by name.
        header: what it, or the file beside it, says by its trainer's name.
    """
    names = {"W_dec": "w_dec", "b_dec": "b_dec", "W_enc": "w_enc", "b_enc": "b_enc"}
    fields: FileFields = {
        field: tensors[name] for name, field in names.items() if name in tensors
    }
    # `Dictionary` refuses directions of another number of axes than two.
    n, dim = (*fields["w_dec"].shape, 0)[:2]
    # How it encodes is in the header: ours, saev's or SAELens'.
    if "vitsee" in header:
        if not isinstance(header["vitsee"], dict):
            raise VitseeError("its metadata is damaged; expected a JSON object")
        saved = header["vitsee"]
        fields |= {name: value for name, value in saved.items() if name in SAVED}
    elif "saev" in header:
        fields |= _saev_fields(header["saev"])
    elif "cfg" in header:
        fields |= _saelens_fields(header["cfg"], fields)
    else:
        # saev's state dict without its line of configuration; x is not centred there.
        log.warning(
            "%s: nothing beside the file says how it was trained: x is %s",
            path,
            "not centred (--centre)",
        )
    for name in ("threshold", "activation.threshold", "topk_threshold"):
        if name in tensors:
            threshold = tensors[name]
            if threshold.size == 1:  # the same for all directions
                threshold = np.full(n, threshold, np.float32)
            fields["threshold"] = threshold
            fields.setdefault("kind", "jumprelu" if name == "threshold" else "batchtopk")
    if "b_dec" not in fields:
        log.info("%s: no b_dec: 0 is assumed", path)
        fields["b_dec"] = np.zeros(dim, np.float32)
    if "w_enc" in fields and "b_enc" not in fields:
        log.info("%s: no b_enc: 0 is assumed", path)
        fields["b_enc"] = np.zeros(n, np.float32)
    return fields


def _saev_fields(header: FileFields) -> FileFields:
    """Return the fields of `Dictionary` that saev's configuration says.

    Args:
        header: the line of JSON before the tensors.

    Raises:
        VitseeError: an activation that is not supported.
    """
    activation = header.get("cfg", {}).get("activation", {})
    kind = activation.get("cls")
    parameters = activation.get("params", {})
    if kind not in _SAEV_KINDS:
        raise VitseeError(
            f"saev's activation {kind!r} is not supported; expected "
            f"{', '.join(_SAEV_KINDS)}"
        )
    # saev's TopK keeps negative numbers among the k largest.
    return {"kind": _SAEV_KINDS[kind], "k": parameters.get("top_k"), "positive": False}


def _saelens_fields(cfg: FileFields, fields: FileFields) -> FileFields:
    """Return the fields that SAELens' configuration states; raise VitseeError if unsupported.

    Args:
        cfg: the contents of cfg.json.
        fields: the arrays of the file, which are rescaled if the configuration says so.
    """
    kind = cfg.get("architecture", "standard")
    k = cfg.get("k")
    # SAELens before version 6 stated topk as an activation function.
    if cfg.get("activation_fn_str", cfg.get("activation_fn")) == "topk":
        kind = "topk"
        k = (cfg.get("activation_fn_kwargs") or {}).get("k")
    if kind not in _SAELENS_KINDS:
        raise VitseeError(
            f"SAELens' architecture {kind!r} is not supported; expected "
            f"{', '.join(_SAELENS_KINDS)}"
        )
    # Both change the numbers that the encoder sees.
    for name in UNSUPPORTED_SETTINGS:
        value = cfg.get(name) or "none"
        if value != "none":
            raise VitseeError(
                f"{name} is {value!r}, which is not supported; fold it into the "
                "weights first"
            )
    config_fields: FileFields = {"kind": _SAELENS_KINDS[kind], "k": k}
    config_fields["centre"] = bool(cfg.get("apply_b_dec_to_input", True))
    has_encoder = "w_enc" in fields and "b_enc" in fields
    if cfg.get("rescale_acts_by_decoder_norm") and has_encoder:
        # The norms of the directions, (K,), are folded into the encoder, as SAELens does itself.
        norms = np.linalg.norm(fields["w_dec"], axis=1)
        config_fields["w_enc"] = fields["w_enc"] * norms
        config_fields["b_enc"] = fields["b_enc"] * norms
        config_fields["w_dec"] = fields["w_dec"] / np.maximum(norms, 1e-8)[:, None]
    return config_fields


def _overcomplete_fields(path: Path, tensors: Tensors) -> FileFields:
    """Return the fields of `Dictionary` in a file of overcomplete.

    The kind is known only from thresholds; the user gives it for files without.

    Raises:
        VitseeError: an encoder that is not a single linear layer.
    """
    weights = tensors["dictionary._weights"]
    if weights.ndim != 2:
        raise VitseeError(
            f"dictionary._weights is {weights.shape}; expected (K, channels)"
        )
    n, dim = weights.shape
    supported = (
        "encoder.final_block.0.",
        "encoder.weight",
        "encoder.bias",
        "dictionary.",
        "thresholds",
    )
    unsupported = [name for name in tensors if not name.startswith(supported)]
    if unsupported:
        raise VitseeError(
            f"an encoder with {unsupported[0]} is not supported; expected one linear layer"
        )
    log.info(
        "%s: rows of the dictionary are normalised to length 1, overcomplete's default",
        path,
    )
    # (K, D); 1e-8 as in overcomplete, so that both give the same numbers.
    directions = weights / (np.linalg.norm(weights, axis=1, keepdims=True) + 1e-8)
    # The multiplier and the thresholds are stored as logarithms.
    log_multiplier = tensors.get("dictionary.multiplier", np.zeros((), np.float32))
    directions = directions * np.exp(log_multiplier)
    # An MLP encoder without hidden layers has its linear layer in a final block.
    encoder = tensors.get("encoder.final_block.0.weight", tensors.get("encoder.weight"))
    bias = tensors.get("encoder.final_block.0.bias", tensors.get("encoder.bias"))
    if encoder is None:
        log.info(
            "%s: no encoder: the dictionary's own rows are taken (tied weights)", path
        )
        encoder = directions
    fields: FileFields = {
        "w_dec": directions.astype(np.float32),
        "b_dec": np.zeros(dim, np.float32),
        "w_enc": encoder.T,
        "b_enc": np.zeros(n, np.float32) if bias is None else bias,
    }
    if "thresholds" in tensors:
        fields["kind"] = "jumprelu"
        fields["threshold"] = np.exp(tensors["thresholds"])
    return fields
