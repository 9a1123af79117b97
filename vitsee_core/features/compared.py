"""Checks that compared stores agree in everything that decides what their features mean.

Stores whose vectors are compared directly (train and test, queries and database) must be of one
model, with the same weights, skip connections, interventions and transform:
`require_comparable`. Stores of different models can be compared over the same images (CKA);
differences in preprocessing are then logged. `compared` records either kind of comparison for a
sidecar.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitsee_stores.errors import StoreMismatch
from vitsee_stores.manifest import abbreviate
from vitsee_stores.weights_names import weights_name

if TYPE_CHECKING:
    from vitsee_stores import Store

log = logging.getLogger(__name__)

# Identity fields that decide a vector, in the order of checks, with their descriptions.
DECISIVE = {
    "model": "models",
    "weights": "weights",
    "ablate_skip": "skip connections",
    "interventions": "interventions",
    "transform": "transforms",
}
NORMALISATION = ("mean", "std")
LOGGED = ("transform", "precision")
RECORDED = (*DECISIVE, "precision", "order")
ABSENT = {"ablate_skip": [], "interventions": [], "precision": "fp32"}
ABSENT_KEYS = {"processor": "timm"}  # of a transform: whose way of resizing and cropping


def default_token(stores: Iterable[Store], site: str) -> str:
    """`cls` if the site has a class token in every store that has the site, else `mean`."""
    layouts = [store.site(site).layout for store in stores if site in store.sites]
    if all(layout is None or layout.cls_tokens for layout in layouts):
        return "cls"
    return "mean"


def model_key(store: Store) -> str:
    """Equal for stores with the same model, weights, skip connections and interventions."""
    return json.dumps(
        [_setting(store, name) for name in [*DECISIVE][:-1]], sort_keys=True
    )


def require_comparable(
    store: Store, others: Iterable[Store], *, trains: str = ""
) -> None:
    """Refuse stores whose vectors are not comparable with those of `store`.

    Args:
        store: one.
        others: the others.
        trains: the command that learns from `store` and tests on the others, if it does.

    Raises:
        StoreMismatch: another model, weights, skip connections, interventions or transform.
    """
    for other in others:
        names = [one.manifest.model.get("name") for one in (store, other)]
        for field, words in DECISIVE.items():
            for key, (ours, theirs) in _differences((store, other), field):
                what = f"{key}: {_text(ours)} against {_text(theirs)}"
                if field == "model" and names[0] != names[1]:
                    what = f"{names[0]} against {names[1]}"
                if field == "weights":
                    ours, theirs = (
                        weights_name(s.manifest.model) for s in (store, other)
                    )
                    what = (
                        f"{ours} against {theirs}"
                        if ours != theirs
                        else f"both {names[0]}"
                    )
                advice = "extract both in the same way"
                if trains and field == "model":
                    advice = (
                        f"{store.label} is TRAIN and {other.label} TEST, which are of one model: "
                        f"run vitsee {trains} for each model, TRAIN and TEST of its own"
                    )
                raise StoreMismatch(
                    f"{store.label} and {other.label} were made with different {words} ({what}); "
                    f"{advice}"
                )


def require_same_transform(
    base: Store, changed: Sequence[Store], allowed: bool, option: str
) -> list[str]:
    """Return remarks on stores of one model whose preprocessing is the change that is measured.

    Normalisation belongs to the weights that were trained with it: of other weights it may differ.

    Args:
        base: the unchanged model's.
        changed: those that are compared with it.
        allowed: whether other preprocessing may be the change, if it is the only one.
        option: the option that says so.

    Raises:
        StoreMismatch: a changed store was made of other pixels than the base, and that is not
            allowed, or not all that differs; or it is allowed, and no store was.
    """
    remarks = []
    for store in changed:
        pair = (base, store)
        of_model = _other_model(pair)
        settings = [
            f"{key}: {_text(ours)} against {_text(theirs)}"
            for key, (ours, theirs) in _differences(pair, "transform")
            if not (of_model and key in NORMALISATION)
        ]
        if not settings:
            continue
        difference = (
            f"{base.label} and {store.label} saw other pixels ({abbreviate(settings)})"
        )
        if of_model:
            raise StoreMismatch(
                f"{difference} and have different {' and '.join(of_model)}: an effect is of one "
                "change; extract both with the same preprocessing"
            )
        if not allowed:
            raise StoreMismatch(
                f"{difference}: extract both with the same preprocessing, or give {option} to "
                "measure what it does"
            )
        remarks.append(f"{difference}: this is the change that is measured")
    if allowed and not remarks:
        raise StoreMismatch(
            f"{option}: all stores have the preprocessing of {base.label}; leave it out"
        )
    return remarks


def _other_model(pair: tuple[Store, Store]) -> list[str]:
    """Return in words what differs between the models of two stores beside their input's size."""
    words = []
    ours, theirs = (store.manifest for store in pair)
    sizes = [
        setting for key, setting in _differences(pair, "transform") if key == "input_size"
    ]
    for field, word in DECISIVE.items():
        keys = {key for key, _ in _differences(pair, field)}
        if field == "transform":
            continue
        if field == "model":
            keys -= {"input_size", "args"} if sizes else {"input_size"}
        # Position tables are resampled for another input size, so that the digest is another, too.
        if (
            field == "weights"
            and sizes
            and weights_name(ours.model) == weights_name(theirs.model)
        ):
            continue
        if keys:
            words.append(word)
    return words


def other_precision(stores: Sequence[Store]) -> list[str]:
    """Return a remark if the forward passes of stores were made in different precisions."""
    return [
        f"forward passes of different precision, which decides digits of the features: "
        f"{_by_value(stores, values)}"
        for _, values in _differences(stores, "precision")
    ]


def compared(
    stores: Iterable[Store], tokens: Mapping[str, str] | str, *, asked: str | None = ""
) -> dict[str, Any]:
    """Return the sidecar's record of a comparison, and log differences in transform, precision
    or token.

    Args:
        stores: any number; one is compared with itself.
        tokens: what was compared, for each site or for all of them.
        asked: the token that the user requested, None for the default.
    """
    distinct = list({store.manifest.store_id: store for store in stores}.values())
    lines = []
    record = {}
    for field in RECORDED:
        differing = [
            f"{key}: {_by_value(distinct, values)}"
            for key, values in _differences(distinct, field)
        ]
        if not differing:
            record[field] = _setting(distinct[0], field)
        if differing and field in LOGGED:
            log.info(
                "the %ss of the compared stores differ: %s", field, "; ".join(differing)
            )
        lines += differing
    if asked is None and not isinstance(tokens, str):
        lines += _without_class_token(distinct, tokens)
    labels = [store.label for store in distinct]
    return {"stores": labels, "tokens": tokens, **record, "differences": lines}


def _without_class_token(
    stores: Sequence[Store], tokens: Mapping[str, str]
) -> Iterator[str]:
    """Log and yield a remark for each set of stores that have no class token, where others
    have one and all are compared by the mean."""
    sites: dict[str, list[str]] = {}
    for site, word in tokens.items():
        layouts = {s.label: s.site(site).layout for s in stores if site in s.sites}
        bare = [
            label for label, layout in layouts.items() if layout and not layout.cls_tokens
        ]
        if word == "mean" and 0 < len(bare) < len(layouts):
            sites.setdefault(abbreviate(bare), []).append(site)
    for labels, names in sites.items():
        line = (
            f"tokens: the mean over patches in all stores, as {labels} has no class token"
        )
        log.info("%s (%s)", line, abbreviate(names))
        yield line


def _setting(store: Store, field: str) -> Any:
    identity = store.manifest.identity
    value: Any = identity.get(field) or ABSENT.get(field)
    canvas = identity.get("canvas") or {}
    own_grids = bool(canvas.get("own_grids"))
    if (own_grids and field == "model") or (
        field == "transform" and (canvas.get("tiles") or own_grids)
    ):
        # Size of the largest image: the model does not see the rest of the canvas. The size that a
        # model was examined on, for images with grids of their own, is at most that.
        value = {key: own for key, own in value.items() if key != "input_size"}
    return value


def _differences(stores: Sequence[Store], field: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield (key, value in each store) for everything that differs between them."""
    settings = [_setting(store, field) for store in stores]
    if None in settings and any(isinstance(setting, Mapping) for setting in settings):
        yield field, ["not known" if setting is None else "known" for setting in settings]
        return
    if not any(isinstance(setting, Mapping) for setting in settings):
        settings = [{field: setting} for setting in settings]
    for key in sorted({key for setting in settings for key in setting or ()}):
        values = [(setting or {}).get(key, ABSENT_KEYS.get(key)) for setting in settings]
        if any(value != values[0] for value in values):
            yield key, values


def _by_value(stores: Sequence[Store], values: Sequence[Any]) -> str:
    """Return each value with the stores that have it: `0.9 (a, b), 0.5 (c)`."""
    labels: dict[str, list[str]] = {}
    for store, value in zip(stores, values, strict=True):
        labels.setdefault(_text(value), []).append(store.label)
    return ", ".join(f"{value} ({abbreviate(own)})" for value, own in labels.items())


def _text(value: Any) -> str:
    """Return a value as text, with digests shortened to their first digits."""
    if isinstance(value, str) and len(value) == 64:
        return value[:8]
    return str(value)
