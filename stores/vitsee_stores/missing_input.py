"""Messages for missing arrays: why a store lacks one, and which extract option adds it."""

from __future__ import annotations

from vitsee_stores.manifest import Manifest

# A store that is there takes more sites and images only.
ELSEWHERE = "-o NEW.zarr"


def no_weights(label: str, manifest: Manifest, name: str) -> str:
    head = "head_weights" if name.startswith("head_") else "input_weights"
    absent = (manifest.info.get(head) or {}).get("absent")
    reason = absent.get(name) if isinstance(absent, dict) else absent
    return f"{label} has no weights {name}{f': {reason}' if reason else ''}"


def no_attention(label: str, manifest: Manifest, name: str, path: str) -> str:
    reason = manifest.left_out.get("attention") or manifest.left_out.get(name)
    if reason:
        return f"{label} has no {path}: it was left out: {reason}"
    level = {"cls_rows": "rows", "received_rows": "rows"}.get(name, "summary")
    level = "full" if name.startswith("full/") else level
    return f"{label} has no {path} (extract it with --attention {level} {ELSEWHERE})"


def no_residual(label: str, manifest: Manifest, sublayer: str) -> str:
    names = [name for name, _ in manifest.plan.sublayers]
    if names:
        why = f"it has: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
    else:
        why = _left_out_or(manifest.left_out.get("residual"), "--residual")
    return f"{label} has no residual summary of {sublayer} ({why})"


def no_field(label: str, manifest: Manifest, site: str) -> str:
    reason = None if manifest.plan.erf is None else manifest.left_out.get(f"{site} erf")
    return f"{label} has no receptive field of {site} ({_left_out_or(reason, '--erf 256')})"


def _left_out_or(reason: str | None, option: str) -> str:
    return f"left out: {reason}" if reason else f"extract it with {option} {ELSEWHERE}"


def no_whole_grid(label: str, manifest: Manifest, n: int, n_images: int) -> str:
    """Refusal to read tokens of images that do not fill the canvas."""
    canvas = manifest.plan.canvas
    assert canvas is not None
    height, width = canvas.size
    return (
        f"{label} has {n} of {n_images} images that do not fill its canvas of {width} x {height} "
        "pixels, and what is asked for reads tokens beside them too; expected images of one size, "
        "or, of commands that take it, --tokens mean, which leaves these out"
    )
