"""Human-readable names of metrics, sites and tokens, for figures and reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

METRICS = {
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
    "top1_class": "top-1 accuracy of the class",
    "r": "correlation with the response",
    "r2": "explained variance (R²)",
    "r_normalised": "correlation / noise ceiling",
    "r2_normalised": "R² / noise ceiling",
    "r_median": "median correlation",
    "r_mean": "mean correlation",
    "r2_median": "median R²",
    "r2_mean": "mean R²",
    "r_normalised_median": "median correlation / ceiling",
    "r_normalised_mean": "mean correlation / ceiling",
    "r2_normalised_median": "median R² / ceiling",
    "r2_normalised_mean": "mean R² / ceiling",
    "purity": "purity",
    "nmi": "normalised mutual information",
    "ari": "adjusted Rand index",
    "segment_purity": "purity of segments",
    "segment_nmi": "normalised mutual information of segments",
    "segment_ari": "adjusted Rand index of segments",
    "jf": "mean of J and F",
    "j": "region similarity J",
    "f": "contour accuracy F",
    "j_recall": "recall of J",
    "f_recall": "recall of F",
    "j_decay": "decay of J",
    "f_decay": "decay of F",
    "iou": "IoU with the objects",
    "miou": "mean IoU of classes",
    "pixel_accuracy": "pixel accuracy",
    "boundary_iou": "boundary IoU of classes",
    "rmse": "RMSE (m)",
    "abs_rel": "relative error",
    "a1": "depths within a quarter",
    "iou_class": "IoU of the class",
    "map": "mean average precision",
    "ap": "average precision",
    "distance_px": "attention distance (px)",
    "distance_px_raw": "attention distance, not renormalised (px)",
    "distance_unit": "attention distance (unit square)",
    "distance_relative": "attention distance / uniform",
    "distance_frames": "attention distance in time (frames)",
    "distance_seconds": "attention distance in time (s)",
    "frame_mass": "attention within own frame (share)",
    "prefix_mass": "attention to prefix tokens (share)",
    "entropy": "entropy of attention (nats)",
    "sink_max": "most attended token (even: 1)",
    "sink_median": "median token (even: 1)",
    "sink_share": "heads with a sink (share)",
    "qk_nmi": "NMI of queries and keys (0: alike)",
    "radius50_px": "radius of 50 % of the mass (px)",
    "radius90_px": "radius of 90 % of the mass (px)",
    "offset_px": "offset from the image's middle (px)",
    "gradient": "mean absolute gradient",
    "lens_top1": "top-1 of the block's tokens",
    "lens_agreement": "agreement with the output",
    "lens_rank": "rank of the label",
    "own_top1": "own patch first (fraction of tokens)",
    "own_rank_relative": "own patch's rank (0 first, 1 last)",
    "own_margin": "own patch's CKA less best other's",
    "own_cka": "own patch's CKA",
    "own_rank": "own patch's rank (1 first)",
    "peak_distance_px": "from own to most similar patch (px)",
    "norm_ratio": "|z| / |f(z)|, mean",
    "norm_ratio_median": "|z| / |f(z)|, median",
    "norm_ratio_geomean": "|z| / |f(z)|, geometric mean",
    "cos_branch": "cosine of z and f(z)",
    "cos_out": "cosine of z and z + f(z)",
    "skip_norm": "|z|, mean",
    "branch_norm": "|f(z)|, mean",
    "norm": "mean norm of tokens",
    "norm_median": "median norm of tokens",
    "outlier_share": "outliers (share of patches)",
    "outlier_share_mad": "patches above median + 6 MAD",
    "massive_top1": "largest |activation|",
    "massive_ratio": "largest |activation| / median",
    "neighbour_cos": "cosine of neighbouring patches",
    "bimodality": "bimodality of log norms",
    "lds": "LDS: near minus far cosine",
    "lds_scaled": "LDS, distances of this grid",
    "cds": "CDS: decline with distance",
    "cds_scaled": "CDS, distances of this grid",
    "srss": "SRSS: object minus background",
    "rmsc": "RMSC (0: all patches alike)",
    "mean_cos": "mean cosine of patches",
    "fourier_high": "log amplitude, high minus zero",
    "fourier_radial": "log amplitude minus zero's",
    "next_cos": "cosine with itself, next frame",
    "next_other_cos": "cosine with other places, next frame",
    "slowness": "slowness: itself minus others",
    "any_frame_cos": "cosine with itself, any other frame",
    "other_clip_cos": "cosine with its place in other clips",
    "share_image": "variance share of the image",
    "share_position": "variance share of the position",
    "share_rest": "variance share of neither",
    "rankme": "RankMe",
    "effective_rank": "effective rank (centred)",
    "participation_ratio": "participation ratio",
    "alpha": "decay of the spectrum, alpha",
    "anisotropy": "anisotropy (mean cosine)",
    "twonn": "intrinsic dimension (TwoNN)",
    "nc1": "NC1: within / between classes",
    "cdnv": "class-distance normalised variance",
    "nc2_norms": "NC2: spread of class means' norms",
    "nc2_angles": "NC2: angles from a simplex",
    "nc4": "NC4: nearest mean against logits",
    "cka": "CKA",
    "top1_difference": "change of top-1 accuracy",
    "spearman_kl": "rank correlation of KL with distance",
    "spearman_kl_within": "the same within blocks",
    "spearman_top1": "rank correlation of lost accuracy with distance",
    "spearman_top1_within": "the same within blocks",
    "agreement": "same class as the base (share)",
    "kl": "KL(base || changed) (nats)",
    "cosine": "cosine of tokens",
    "mutual_knn": "mutual k-NN",
    "cknna": "CKNNA",
    "rsa": "RSA (Spearman)",
    "procrustes": "Procrustes similarity",
    "svcca": "SVCCA",
    "gulp": "GULP distance (0: alike)",
    "ridge_r2": "ridge R² (a from b)",
}
# `map@100`, `map@100_easy`: a number after the at sign, then perhaps a difficulty.
_METRICS_AT = {
    "mp": "mean precision at {}",
    "map": "mean average precision at {}",
    "pck": "keypoints found (PCK at {})",
    "pck_point": "keypoints found (PCK at {}, per point)",
    "pck_image": "keypoints found (PCK at {}, per image)",
}
TOKENS = {
    "all": "all tokens",
    "patches": "patches",
    "cls": "class token",
    "dist": "distillation token",
    "flat": "all tokens",
    "prefix": "prefix tokens",
    "registers": "registers",
    "mean": "mean over patches",
    "mean-all": "mean over all tokens",
    "first": "first token",
    "rest": "mean of all but the first token",
    "each": "mean over the tokens' probes",
    "vectors": "vectors",
}
_SITES = {
    "embed": "embedding",
    "stem": "stem",
    "norm": "final norm",
    "pooled": "pooled",
    "logits": "logits",
}
# The parts of a block by the end of their name; the output of the block needs no word.
BLOCK_PARTS = {
    "in": "input",
    "out": "",
    "mid": "after attention",
    "norm1": "norm 1",
    "norm2": "norm 2",
    "attn": "attention",
    "mlp": "MLP",
    "token": "token mixing",
    "channel": "channel mixing",
    "attn.heads": "heads",
    "attn.branch": "attention",
    "mlp.branch": "MLP",
    "mlp.hidden": "MLP, hidden",
    "token.hidden": "token mixing, hidden",
    "token.branch": "token mixing",
    "channel.hidden": "channel mixing, hidden",
    "channel.branch": "channel mixing",
    "branch": "branch",
    "shortcut": "shortcut",
}
BASELINES = {
    "random": "random features",
    "grid": "best possible on this grid",
    "shuffled": "shuffled labels",
    "still": "same place",
    "central": "blob in the centre",
    "image": "whole image",
    "majority": "most frequent class",
    "position": "position alone",
    "untrained": "untrained model",
}
# Not a baseline: the score that the noise of the measured responses leaves to the best model.
CEILING = "ceiling"
# The baselines of saliency (metric `iou`) are maps.
_BASELINE_MAPS = {
    "uniform": "uniform map",
    "centre": "centre of the image",
    "random": "map of noise",
}


def metric_words(metric: str) -> str:
    """Return a metric as an axis label: `top-1 accuracy`, `mean average precision (easy)`."""
    if metric in METRICS:
        return METRICS[metric]
    match = re.fullmatch(r"(\w+?)@([\d.]+)(?:_(\w+))?", metric)
    if match is not None and match[1] in _METRICS_AT:
        name, number, difficulty = match.groups()
        words = _METRICS_AT[name].format(number)
        return f"{words} ({difficulty})" if difficulty else words
    # `map_easy`: a known metric with an ending.
    name, _, ending = metric.rpartition("_")
    return f"{METRICS[name]} ({ending})" if name in METRICS else metric


def site_words(site: str, block: str = "") -> str:
    """Return a site in a title: `block 3`, `block 3, attention`, `layer1.0`, `final norm`.

    Args:
        site: its name.
        block: the path of its block; if "", the name up to its last number that ends a word.
    """
    if site in _SITES:
        return _SITES[site]
    if not block:
        match = re.match(r"(?:.*\.)?[a-z]*\d+(?=\.|$)", site)
        block = match[0] if match is not None else ""
    if not block:
        return site
    part = site.removeprefix(block).lstrip(".")
    words = BLOCK_PARTS.get(part, part)
    if words:
        return f"{block_words(block)}, {words}"
    return block_words(block)


def block_words(block: str) -> str:
    """Return `block 3` for `blocks.3`, `block 1.2` for `stages.1.blocks.2`.

    A path of another form stays as it is.
    """
    numbers = re.findall(r"\d+", block)
    pattern = re.sub(r"\d+", "*", block)
    if pattern in ("blocks.*", "stages.*.blocks.*", "layers.*.blocks.*"):
        return f"block {'.'.join(numbers)}"
    return block


def token_words(token: str) -> str:
    """Return a token in a title: `class token`, `register 0`, `patch 2,3` (row and column).

    Tokens of clips begin with the frame: `class token 0`, `patch 1,2,3`.
    """
    if token in TOKENS:
        return TOKENS[token]
    if match := re.fullmatch(r"reg(\d+)", token):
        return f"register {match[1]}"
    if match := re.fullmatch(r"(\w+)\.(\d+)", token):
        return f"{token_words(match[1])} {match[2]}"
    if re.fullmatch(r"(\d+,)?\d+,\d+", token):
        return f"patch {token}"
    return token


def baseline_words(name: str, metric: str = "") -> str:
    """Return a baseline in a legend: `baseline: random features`."""
    if name == CEILING:
        return "noise ceiling"
    words = BASELINES
    if metric == "iou":
        words = BASELINES | _BASELINE_MAPS
    return f"baseline: {words.get(name, name)}"


def task_words(task: str) -> str:
    """Return a task of best-layer: `knn: top-1 accuracy, k = 20` for `knn top1, k = 20`."""
    head, comma, settings = task.partition(",")
    command, _, metric = head.rpartition(" ")
    return f"{command}: {metric_words(metric)}{comma}{settings}".removeprefix(": ")


# The words "images" and "1 image", unless they stand in a path such as a clip's id.
_IMAGES = re.compile(r"(?<![\w/.\\-])(images|(?<=\b1 )image)(?![\w/\\-]|\.\w)")


def example_noun(record: Mapping[str, Any]) -> str:
    """Return "images" or "clips": what a store holds, by its description."""
    return "images" if record.get("clip") is None else "clips"


def name_examples(text: str, notes: Mapping[str, Any]) -> str:
    """Return a text about images; for a table over clips it speaks of clips.

    Args:
        text: written for images.
        notes: of the table; `examples` says whether its stores hold clips.
    """
    if notes.get("examples") != "clips":
        return text
    return _IMAGES.sub(lambda match: "clips" if match[0] == "images" else "clip", text)
