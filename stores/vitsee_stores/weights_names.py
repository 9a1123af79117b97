"""Names of a model's weights, as the column `weights` of tables has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitsee_stores.manifest import Manifest

HASH_DIGITS = 8


def _pretrained_tag(name: object) -> str:
    """Return the tag of pretrained weights `NAME.TAG`, or "pretrained" if there is none.

    A dot in a repository or path, `OWNER/NAME`, does not begin a tag; a dot in timm's names
    for a hub, `hf-hub:OWNER/NAME.TAG`, does.
    """
    text = str(name or "")
    is_path = "/" in text and ":" not in text
    if is_path:
        return "pretrained"
    return text.partition(".")[2] or "pretrained"


def weights_name(model: Mapping[str, Any]) -> str:
    """Return the name of a model's weights as tables show it.

    The name depends on where the weights came from:

        pretrained         their tag (`augreg_in21k_ft_in1k`), "pretrained" without one; the
                           folder's name for weights of a folder
        random             `random SEED`
        checkpoint file    its name (`dino.pth`); with several state dicts `dino.pth#student`
        anything else      the first digits of the weights' hash; "" without any information

    After it follow `, without blocks.3.attn` for ablated skips, `, cls=mean at blocks.6.out`
    for interventions, and `, codes of sae.pt` for stores of codes.

    Args:
        model: the `model` of a manifest; `weights`, `ablate_skip`, `interventions` and
            `codes` may be missing.
    """
    weights = model.get("weights")
    if not isinstance(weights, Mapping):
        weights = {}
    words = [_source_name(weights)]
    if skips := [str(skip) for skip in model.get("ablate_skip") or ()]:
        words.append(f"without {', '.join(ranges(skips))}")
    words += map(str, model.get("interventions") or ())
    if model.get("codes"):
        words.append(f"codes of {model['codes']}")
    return ", ".join(words)


def _source_name(weights: Mapping[str, Any]) -> str:
    """Return the name of weights by the manifest's record of their source."""
    source = weights.get("source")
    if source == "random":
        return f"random {weights.get('seed', '')}".rstrip()
    if source == "checkpoint":
        name = str(weights.get("file") or "checkpoint")
        # The key is needed only to tell the file's state dicts apart.
        if weights.get("other_keys") and weights.get("key"):
            name += f"#{weights['key']}"
        return name
    if source in ("pretrained", "local-dir"):
        folder = str(weights.get("folder") or "")
        return folder or _pretrained_tag(weights.get("pretrained"))
    digest = str(weights.get("sha256") or "")[:HASH_DIGITS]
    if isinstance(source, str):
        return f"{source} {digest}".strip()
    return digest


def described_weights(manifest: Manifest) -> str:
    """Return `weights_name` of a store, and for clips how their frames were sampled.

    For clips `, 8 frames` follows, then `, every 2` where sampled frames are that many frames
    apart, and `, shuffled in time` or `, still in time` for controls. Orders of another seed than 0
    are `, shuffled in time by seed 3`.
    """
    name = weights_name(manifest.model)
    clip = manifest.plan.clip
    if clip is None:
        return name
    words = [name, f"{clip.frames} frames"]
    if clip.every is not None:
        words.append(f"every {clip.every}")
    if clip.time != "ordered":
        # The plan says how frames are ordered, the transform by which seed.
        transform_clip = (manifest.transform or {}).get("clip") or {}
        seed = transform_clip.get("seed")
        by_seed = f" by seed {seed}" if seed else ""
        words.append(f"{clip.time} in time{by_seed}")
    return ", ".join(words)


def ranges(names: Sequence[str]) -> list[str]:
    """Return paths in short, those that differ in consecutive last numbers as a range.

    Example:
        >>> ranges(["blocks.0.attn", "blocks.1.attn", "blocks.2.attn", "norm"])
        ['norm', 'blocks.0-2.attn']
    """
    # (text before the number, text after it) -> numbers
    numbers: dict[tuple[str, str], list[int]] = {}
    texts: list[str] = []
    for name in names:
        if match := re.fullmatch(r"(.*\.)(\d{1,9})((?:\.\D+)?)", name):
            numbers.setdefault((match[1], match[3]), []).append(int(match[2]))
        else:
            texts.append(name)
    for (before, after), group in numbers.items():
        runs: list[list[int]] = []  # [first, last] of consecutive numbers
        for n in sorted({*group}):
            if runs and n == runs[-1][1] + 1:
                runs[-1][1] = n
            else:
                runs.append([n, n])
        for first, last in runs:
            number = f"{first}-{last}" if last > first else str(first)
            texts.append(f"{before}{number}{after}")
    return texts
