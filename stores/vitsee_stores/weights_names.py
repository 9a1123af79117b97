"""The name of a model's weights, from the manifest alone: column `weights` of tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SHORT = 8  # digits of a hash


def weights_name(model: Mapping[str, Any]) -> str:
    """The pretrained tag (`augreg_in21k_ft_in1k`), `random SEED`, or the checkpoint file's name
    (`dino.pth`, `dino.pth#student` if it has several state dicts), then `, without
    blocks.3.attn` for ablated skips, `, cls=mean at blocks.6.out` for interventions and `, codes of
    sae.pt` for stores of codes. "pretrained" for weights without a tag, the first digits of their
    hash if the source is unknown, "" without any information.

    Args:
        model: the `model` of a manifest; `weights`, `ablate_skip`, `interventions` and `codes` may
            be missing.
    """
    record = model.get("weights")
    weights = record if isinstance(record, Mapping) else {}
    source, digest = weights.get("source"), str(weights.get("sha256") or "")[:SHORT]
    if source == "random":
        name = f"random {weights.get('seed', '')}".rstrip()
    elif source == "checkpoint":
        key = f"#{weights.get('key')}" if weights.get("other_keys") else ""
        name = f"{weights.get('file') or 'checkpoint'}{key}"
    elif source in ("pretrained", "local-dir"):
        name = str(weights.get("pretrained") or "").partition(".")[2] or "pretrained"
    else:
        name = " ".join(filter(None, [source if isinstance(source, str) else "", digest]))
    ablated = [str(skip) for skip in model.get("ablate_skip") or ()]
    without = [f"without {', '.join(ranges(ablated))}"] if ablated else []
    codes = [f"codes of {model['codes']}"] if model.get("codes") else []
    return ", ".join([name, *without, *map(str, model.get("interventions") or ()), *codes])


def ranges(names: Sequence[str]) -> list[str]:
    """Paths in short: `blocks.0-11.attn` for those that differ in consecutive last numbers."""
    numbers: dict[tuple[str, str], list[int]] = {}
    texts: list[str] = []
    for name in names:
        if match := re.fullmatch(r"(.*\.)(\d{1,9})((?:\.\D+)?)", name):
            numbers.setdefault((match[1], match[3]), []).append(int(match[2]))
        else:
            texts.append(name)
    for (before, after), known in numbers.items():
        runs: list[list[int]] = []
        for n in sorted({*known}):
            if runs and n == runs[-1][1] + 1:
                runs[-1][1] = n
            else:
                runs.append([n, n])
        texts += [f"{before}{a}{f'-{b}' if b > a else ''}{after}" for a, b in runs]
    return texts
