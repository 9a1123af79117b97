"""Image models on clips, frame by frame: against image stores of the same frames, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

import vitsee
from tests.clip_files import write_frames, write_video
from tests.extractions import RESNET, VIT, array_bytes, extract, extracted
from vitsee_cli.main import main
from vitsee_core.extraction.by_frame import (
    COUNTED_MEANS,
    FRAME_MEANS,
    QUERY_MEANS,
    FrameObserver,
    clip_layout,
    frame_layout,
)
from vitsee_stores import Store, describe, open_store, validate
from vitsee_stores.layout import TokenLayout
from vitsee_stores.plan import Clip

CLIPS, FRAMES = 5, 3
BROKEN = 3  # clip c3 has a frame that is none
ALL = (
    "--sites",
    "all",
    "--attention",
    "rows",
    "--inputs",
    "--grams",
    "--order",
    "dataset",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of frames c0 to c4, c3 damaged, and a list of all their frames, clip by clip."""
    root = tmp_path_factory.mktemp("clips")
    rng = np.random.default_rng(0)
    for k in range(CLIPS):
        pictures = rng.integers(0, 256, (FRAMES, 50, 60, 3), np.uint8)
        write_frames(root / "frames" / f"c{k}", list(pictures))
    (root / "frames" / f"c{BROKEN}" / "00001.png").write_bytes(b"no image")
    names = [f"frames/c{k}/{t:05d}.png" for k in range(CLIPS) for t in range(FRAMES)]
    (root / "frames.txt").write_text("\n".join(names))
    return root


@pytest.fixture(
    scope="module", params=[pytest.param("vit", marks=pytest.mark.slow), "resnet"]
)
def both(
    request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Store, Store]:
    """The store of clips, and that of their frames as images, in batches of the same frames."""
    folder = tmp_path_factory.mktemp(request.param)
    model = VIT if request.param == "vit" else RESNET
    clips, images = folder / "clips.zarr", folder / "images.zarr"
    keep = [
        word
        for word in ALL
        if request.param == "vit" or word not in ("--attention", "rows")
    ]
    size = ("--slab", 2, "--batch-size", 2)
    extracted(
        *model, "--data", root / "frames", "--frames", FRAMES, *keep, *size, "-o", clips
    )
    size = ("--slab", 2 * FRAMES, "--batch-size", 2 * FRAMES)
    extracted(*model, "--data", root / "frames.txt", *keep, *size, "-o", images)
    assert validate(clips, deep=True) == []
    return open_store(clips), open_store(images)


def valid_clips() -> NDArray[np.bool_]:
    return np.arange(CLIPS) != BROKEN


def of_frames(images: NDArray[Any]) -> NDArray[Any]:
    """(valid clips, frames, ...) of (clips x frames, ...)."""
    return images.reshape(CLIPS, FRAMES, *images.shape[1:])[valid_clips()]


def by_kind(prefix: NDArray[Any]) -> NDArray[Any]:
    """(clips, prefix tokens x frames, ...) of (clips, frames, prefix tokens, ...), by a loop."""
    tokens = [prefix[:, t, p] for p in range(prefix.shape[2]) for t in range(FRAMES)]
    return np.stack(tokens, 1)


def test_tokens_are_those_of_the_frames_to_the_bit(both: tuple[Store, Store]) -> None:
    clips, images = both
    assert clips.valid.tolist() == valid_clips().tolist()
    assert clips.plan.clip == Clip(FRAMES, by_frame=True)
    n = 0
    for site in clips.plan.stored:
        if site.kind == "vector":
            whole = of_frames(images.vectors(site.name)[:]).astype(np.float64)
            assert_array_equal(
                clips.vectors(site.name)[valid_clips()], whole.mean(1).astype(np.float32)
            )
            continue
        assert site.layout is not None
        own = images.site(site.name).layout
        assert own is not None
        body = "rows" if own.grid is None else "grid"
        wanted = of_frames(images.array(f"acts/{site.name}/{body}")[:])
        found = clips.array(f"acts/{site.name}/{body}")[valid_clips()]
        assert_array_equal(found, wanted.reshape(found.shape), strict=True)
        if own.prefix:
            wanted = by_kind(of_frames(images.acts(site.name, "prefix")[:]))
            assert_array_equal(
                clips.acts(site.name, "prefix")[valid_clips()], wanted, strict=True
            )
        for kind in ("cls", "mean"):
            if images.has(f"pooled/{site.name}/{kind}"):
                values = of_frames(images.pooled(site.name, kind)[:]).astype(np.float64)
                assert_array_equal(
                    clips.pooled(site.name, kind)[valid_clips()],
                    values.mean(1).astype(np.float32),
                    strict=True,
                )
        n += 1
    assert n > 3
    assert_array_equal(
        clips.array("input")[valid_clips()],
        of_frames(images.array("input")[:]),
        strict=True,
    )


def test_residual_products_and_grams(both: tuple[Store, Store]) -> None:
    clips, images = both
    for name, layout in images.plan.sublayers:
        wanted, n = of_frames(images.residual(name)[:]), layout.n_prefix
        parts = [wanted[:, :, n:].reshape(len(wanted), -1, 3)]
        parts = [by_kind(wanted[:, :, :n]), *parts] if n else parts
        assert_array_equal(clips.residual(name)[valid_clips()], np.concatenate(parts, 1))
    for site in clips.plan.gram_sites[:2]:
        x = clips.acts(site.name)[:2].reshape(2, -1).astype(np.float64)
        x = x - x.mean(0)
        gram = clips.grams(site.name)[0]
        assert_allclose(gram, x @ x.T, rtol=1e-2, atol=1e-2 * float(np.abs(gram).max()))


def whole_attention(rows: NDArray[Any], n: int) -> NDArray[Any]:
    """Rows over the keys of each frame, (clips, frames, ..., keys), as one of a clip over all keys:
    0 in other frames, and the mean over frames."""
    out = []
    for clip in rows:
        tokens = [clip[t, ..., p] / FRAMES for p in range(n) for t in range(FRAMES)]
        tokens += [
            clip[t, ..., k] / FRAMES
            for t in range(FRAMES)
            for k in range(n, clip.shape[-1])
        ]
        out.append(np.stack(tokens, -1))
    return np.stack(out)


def test_attention_is_that_of_the_frames(both: tuple[Store, Store]) -> None:
    clips, images = both
    if not images.attention_blocks:
        assert not clips.attention_blocks
        return
    (group,), (own,) = clips.attention_blocks, images.attention_blocks
    assert own.layout.grid is not None
    assert group.window == (1, *own.layout.grid)
    single: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
    for name in ("distance_px", "distance_unit", "distance_px_raw", "prefix_mass", "entropy",
                 "query_std", "qk_nmi", "head_std"):  # fmt: skip
        wanted = of_frames(images.attention(name)[:]).mean(1)
        assert_allclose(
            clips.attention(name)[valid_clips()], wanted, **single, err_msg=name
        )
    n_queries = of_frames(images.attention("n_queries")[:])
    assert_array_equal(clips.attention("n_queries")[valid_clips()], n_queries.sum(1))
    assert (clips.attention("distance_frames")[valid_clips()] == 0).all()
    assert (clips.attention("frame_mass")[valid_clips()] == 1).all()
    assert np.isnan(clips.attention("frame_mass")[BROKEN]).all()
    assert (clips.attention("received_argmax")[BROKEN] == -1).all()
    for name in ("received_rows", "cls_rows", "rollout"):
        wanted = whole_attention(
            of_frames(images.attention(name)[:]), own.layout.n_prefix
        )
        found = clips.attention(name)[valid_clips()].astype(np.float32)
        assert_allclose(found, wanted, rtol=2e-3, atol=1e-5, err_msg=name)
    received = clips.attention("received_rows")[valid_clips()].astype(np.float32)
    largest = clips.attention("received_max")[valid_clips()]
    assert_allclose(largest, received.max(-1), rtol=1e-3)
    at = clips.attention("received_argmax")[valid_clips()]
    assert_allclose(
        np.take_along_axis(received, at[..., None], -1)[..., 0], largest, rtol=1e-3
    )
    valid = np.repeat(valid_clips(), FRAMES)
    sums = {
        name: np.asarray(clips.attention_sums(name)).sum(0)
        for name in ("received", "cls_map")
    }
    for name, rows in (("received", "received_rows"), ("cls_map", "cls_rows")):
        wanted = whole_attention(
            of_frames(images.attention(rows)[:]), own.layout.n_prefix
        ).sum(0)
        assert_allclose(sums[name], wanted, rtol=2e-3, atol=1e-4)
        assert_allclose(sums[name].sum(-1), valid_clips().sum(), rtol=1e-3)
    # Those of the image store have the frames of the damaged clip that can be read: taken off.
    aligned = np.asarray(clips.attention_sums("aligned")).sum(0)
    assert_allclose(aligned.sum((-2, -1)), valid_clips().sum(), rtol=1e-5)
    in_time = np.asarray(clips.attention_sums("aligned_frames")).sum(0)
    assert in_time.shape[-1] == 2 * FRAMES - 1
    assert_allclose(in_time[..., FRAMES - 1], aligned.sum((-2, -1)), rtol=1e-6)
    assert in_time.sum() == in_time[..., FRAMES - 1].sum()
    assert valid.sum() == 12


def test_layouts_go_both_ways() -> None:
    image = TokenLayout(("cls", "reg0"), (2, 3), stride_px=(16.0, 16.0))
    clip = clip_layout(image, 3)
    assert clip.prefix == ("cls.0", "cls.1", "cls.2", "reg0.0", "reg0.1", "reg0.2")
    assert (clip.frames, clip.stride_frames, clip.n_tokens) == (3, 1.0, 6 + 18)
    assert list(clip.cls_tokens) == [0, 1, 2]
    assert frame_layout(clip, 3) == image
    rows = TokenLayout(("cls",), None, rows=4)
    assert clip_layout(rows, 3) == TokenLayout(("cls.0", "cls.1", "cls.2"), None, rows=12)
    assert frame_layout(clip_layout(rows, 3), 3) == rows


# models of clips ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "frames"), [("VideoMAEModel", 6), ("TimesformerModel", 3)]
)
def test_models_of_clips_against_the_library(
    videos: Path, tmp_path: Path, name: str, frames: int
) -> None:
    """Tokens as the library's own states have them, those of TimeSformer with frames fastest;
    frames, times and attention as the configuration says."""
    transformers = pytest.importorskip("transformers", minversion="5.20")
    from tests.test_models_clips import library_model

    library_model(name).save_pretrained(tmp_path / "model")
    path = tmp_path / "a.zarr"
    options = (
        "--sites",
        "embed,blocks",
        "--dtype",
        "float32",
        "--inputs",
        "--data",
        videos,
    )
    extracted(f"transformers:{tmp_path / 'model'}", *options, "-o", path)
    assert validate(path, deep=True) == []
    store = open_store(path)
    assert store.plan.clip == Clip(frames)
    layout = store.layout("blocks.0.out")
    assert layout is not None
    assert (layout.frames, layout.grid) == (3, (4, 4))
    assert layout.stride_frames == frames / 3
    model = getattr(transformers, name).from_pretrained(tmp_path / "model").eval()
    with torch.inference_mode():
        states = model(torch.from_numpy(store.inputs()[:]), output_hidden_states=True)
    for site, state in (("embed", 0), ("blocks.1.out", 2)):
        wanted, found = states.hidden_states[state].numpy(), store.acts(site)[:]
        if name == "TimesformerModel":
            body = (
                wanted[:, 1:].reshape(len(wanted), 4, 4, 3, -1).transpose(0, 3, 1, 2, 4)
            )
            wanted = np.concatenate([wanted[:, :1], body.reshape(len(wanted), 48, -1)], 1)
        assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    groups = store.attention_blocks
    assert [group.window for group in groups] == (
        [None] if name == "VideoMAEModel" else [(3, 1, 1), (1, 4, 4)]
    )
    for group in groups:
        share = store.attention("frame_mass", group.prefix)[:]
        alone = group.window == (1, 4, 4)
        assert_allclose(share, 1, rtol=1e-5) if alone else np.testing.assert_array_less(
            share, 1
        )


def invoked(*words: object) -> str:
    """The output of `vitsee WORDS`, which must succeed."""
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


# a store of clips as a store -------------------------------------------------------------------


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    for k in range(5):
        write_video(root / f"class{k % 2}" / f"{k}.mp4", 10)
    return root


SMALL = [
    *VIT,
    "--sites",
    "blocks.-1.out",
    "--attention",
    "none",
    "--no-residual",
    "--frames",
    "2",
]


def test_what_a_store_says_of_its_clips(videos: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    options = ("--every", "3", "--time", "shuffled", "--seed", 4, "--slab", 2)
    made = extracted(*SMALL, "--data", videos, *options, "-o", path).output
    assert "5 clips in 3 slabs" in made and " clips/s" in made and " images" not in made
    store, record = open_store(path), describe(path)
    assert record["features"] == ["clips", "pixel_hash"]
    assert record["clip"] == {
        "frames": 2,
        "every": 3,
        "time": "shuffled",
        "by_frame": True,
    }
    about = {"frames": 2, "every": 3, "time": "shuffled", "seed": 4}
    assert store.manifest.identity["transform"]["clip"] == about
    assert store.manifest.transform["clip"] == about
    assert store.manifest.info["data"]["frames"] == 2
    assert_allclose(store.array("seconds")[:], 0.3, rtol=1e-6)
    assert store.samples.label.tolist() == [int(name[5]) for name in store.samples.id]
    said = invoked("info", path)
    assert (
        "clips      5 clips, 5 of them stored and readable" in said
        and "images" not in said
    )
    assert "frames     2 frames of each, every 3, shuffled, one by one" in said
    assert "2x4x6  cls x 2" in said
    # Repeated, with its choices left out, and with others.
    again = extract(*SMALL[:-2], "--data", videos, "-o", path, "--device", "cpu")
    assert again.exit_code == 0, again.output
    assert "nothing to do" in again.output
    for change, said in [
        (("--frames", 3), "transform.clip.frames is 2, given 3"),
        (("--every", 2), "transform.clip.every is 3, given 2"),
        (("--time", "still"), "transform.clip.time is shuffled, given still"),
    ]:
        refused = extract(*SMALL[:-2], "--data", videos, "-o", path, *change)
        assert refused.exit_code == 1
        assert said in refused.output


def test_clips_resume_and_grow_to_what_they_are_at_once(
    videos: Path, tmp_path: Path
) -> None:
    """A lost slab is made again; more clips, and more sites, are added: the same bytes."""
    order = ("--order", "dataset", "--slab", 2, "--batch-size", 1)
    whole, grown = tmp_path / "whole.zarr", tmp_path / "grown.zarr"
    extracted(*SMALL, "--data", videos, *order, "-o", whole)
    before = array_bytes(whole)
    (whole / "commits" / "c.1.0").unlink()
    extracted(*SMALL, "--data", videos, *order, "-o", whole)
    assert array_bytes(whole) == before
    extracted(*SMALL, "--data", videos, *order, "--images", 2, "-o", grown)
    extracted(*SMALL, "--data", videos, *order, "--images", 5, "-o", grown)
    assert validate(grown, deep=True) == []
    extracted(
        *SMALL, "--data", videos, *order, "--images", 5, "--sites", "embed", "-o", grown
    )
    assert validate(grown, deep=True) == []
    one, two = open_store(whole), open_store(grown)
    for path in one.arrays:
        if path not in ("checksums", "commits"):
            assert_array_equal(one.array(path)[:], two.array(path)[:], err_msg=path)
    layout = two.layout("embed")
    assert layout is not None
    assert layout.frames == 2


@pytest.mark.slow
def test_shards_make_the_same_store(videos: Path, tmp_path: Path) -> None:
    order = ("--order", "dataset", "--slab", 2, "--batch-size", 1, "--data", videos)
    extracted(*SMALL, *order, "-o", tmp_path / "a.zarr")
    for shard in ("0/2", "1/2"):
        extracted(
            *SMALL, *order, "--shard", shard, "--workers", 2, "-o", tmp_path / "b.zarr"
        )
    assert array_bytes(tmp_path / "a.zarr") == array_bytes(tmp_path / "b.zarr")


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_same_bytes(videos: Path, tmp_path: Path) -> None:
    rows = [f"{videos}/class0/0.mp4,{k}" for k in range(60)]
    (tmp_path / "list.csv").write_text("\n".join(["path,id", *rows]))
    words = [
        *SMALL,
        "--data",
        tmp_path / "list.csv",
        "--slab",
        1,
        "--batch-size",
        1,
        "-o",
    ]
    extracted(*words, tmp_path / "whole.zarr")
    killed = tmp_path / "killed.zarr"
    command = [
        sys.executable,
        "-m",
        "vitsee_cli",
        "extract",
        *map(str, words),
        str(killed),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=tmp_path)
    until = time.monotonic() + 120
    while not (killed / "commits" / "c.2.0").exists() and time.monotonic() < until:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert 3 <= describe(killed)["n_committed"] < 60
    extracted(*words, killed)
    assert array_bytes(killed) == array_bytes(tmp_path / "whole.zarr")


def test_slabs_are_sized_by_what_a_clip_has(videos: Path, tmp_path: Path) -> None:
    """256 images' worth: of clips of 10 frames 25."""
    many = tmp_path / "list.csv"
    rows = [f"{videos}/class0/0.mp4,{k}" for k in range(40)]
    many.write_text("\n".join(["path,id", *rows]))
    result = extracted(
        *SMALL[:-1], 10, "--data", many, "--dry-run", "-o", tmp_path / "a.zarr"
    )
    assert "40 clips in slabs of 25" in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "has videos, and test_vit takes images: give --frames N"),
        (("--every", 2), "--every is about frames of clips: give --frames N too"),
        (("--time", "still"), "--time is about frames of clips: give --frames N too"),
        (("--frames", 2, "--erf", 2), "--erf is not supported with clips (--frames)"),
        (
            ("--frames", 2, "--short-side", 64, "--tiles"),
            "--short-side is not supported with clip",
        ),
        (
            ("--frames", 2, "--attention", "full"),
            "--attention full is not supported: an image",
        ),
        (("--frames", 99), "none of the first 5 clips can be read"),
        (
            ("--frames", 2, "--ablate-heads", "blocks.0:0=zero"),
            "--frames with an image model and interventions is not supported",
        ),
    ],
)
def test_what_does_not_go_is_said_in_a_line(
    videos: Path, tmp_path: Path, options: tuple[object, ...], said: str
) -> None:
    result = extract(*VIT, "--data", videos, *options, "-o", tmp_path / "a.zarr")
    assert result.exit_code in (1, 2)
    assert said in result.output
    assert not (tmp_path / "a.zarr").exists()


def test_an_own_module_of_clips_without_a_number_of_frames(
    videos: Path, tmp_path: Path
) -> None:
    """The refusal says what is missing; with --frames it goes on, and what is stated in full is not
    called assumed."""
    (tmp_path / "model.py").write_text(
        "from torch import nn\n"
        "class Clips(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed = nn.Conv3d(3, 8, (2, 8, 8), (2, 8, 8))\n"
        "        block = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)\n"
        "        self.blocks = nn.ModuleList([block])\n"
        "    def forward(self, x):\n"
        "        x = self.embed(x.transpose(1, 2)).flatten(2).transpose(1, 2)\n"
        "        return self.blocks[0](x).mean(1)\n"
        "def build():\n"
        "    return Clips()\n"
    )
    stated = ("--img-size", 32, "--img-mean", 0.5, "--img-std", 0.5, "--sites", "all")
    words = (
        f"{tmp_path / 'model.py'}:build",
        "--data",
        videos,
        *stated,
        "--random-init",
        0,
        "-o",
        tmp_path / "a.zarr",
    )
    result = extract(*words)
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert "does not run on images of 32 x 32 pixels" in result.output
    assert result.output.endswith("; if it takes clips, give --frames N\n")
    assert "assumed" not in extracted(*words, "--frames", 4).output


def test_python_has_the_same_options(videos: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "random_init": 0,
        "img_size": (32, 48),
        "model_args": {"patch_size": 8},
    }
    store = vitsee.extract(
        "test_vit", videos, tmp_path / "a.zarr", frames=2, time="still", sites="blocks.-1.out",
        attention="none", residual=False, images=2, **options,
    )  # fmt: skip
    tokens = store.acts(store.plan.stored[0].name, "patches")[:]
    assert tokens.shape[:2] == (2, 2)
    assert_array_equal(tokens[:, 0], tokens[:, 1])
    with pytest.raises(
        vitsee.VitseeError, match="time is 'later'; expected ordered, shuffled"
    ):
        vitsee.extract("test_vit", videos, tmp_path / "b.zarr", frames=2, time="later")


def test_manifests_of_image_stores_have_no_word_of_clips(
    root: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.zarr"
    extracted(*VIT, "--data", root / "frames.txt", "--images", 2, "--attention", "none",
              "--no-residual", "--sites", "head", "-o", path)  # fmt: skip
    manifest = json.loads((path / "zarr.json").read_text())["attributes"]["vitsee"]
    assert not {"clip"} & set(manifest["plan"])
    assert not {"frames", "every", "time"} & set(manifest["info"]["data"])
    assert "clip" not in manifest["transform"]
    assert "clip" not in manifest["identity"]["transform"]
    assert not (path / "seconds").exists()


def test_frames_count_by_their_queries() -> None:
    """Clips of two frames, one head: 3 queries of mean distance 4 and 1 of 8 have a mean of 5; a
    frame without queries has no part in it, and a clip without any has no value."""
    kind: Any = type(
        "OfTwo", (FrameObserver,), {"_n_frames": 2, "_sum_dtype": torch.float64}
    )
    observer: Any = kind.__new__(kind)
    counts = torch.tensor([[3], [1], [2], [0], [0], [0]])
    distance = torch.tensor([[4.0], [8.0], [7.0], [np.nan], [np.nan], [np.nan]])
    others = dict.fromkeys((*QUERY_MEANS, *FRAME_MEANS), torch.zeros(6, 1))
    given = {"n_queries": counts, **dict.fromkeys(COUNTED_MEANS, distance), **others}
    found = observer._clip_values(SimpleNamespace(**given), torch.ones(3, 1, 4))
    assert found["n_queries"].flatten().tolist() == [4, 2, 0]
    for name in COUNTED_MEANS:
        np.testing.assert_array_equal(found[name].flatten(), [5.0, 7.0, np.nan])
    np.testing.assert_array_equal(found["frame_mass"].flatten(), [1.0, 1.0, np.nan])


def test_other_frames_than_the_weights_are_made_for(tmp_path: Path, videos: Path) -> None:
    """Of a TimeSformer, whose table of times has a row a frame: not the files are wrong."""
    pytest.importorskip("transformers")
    from tests.test_models_clips import library_model

    library_model("TimesformerModel").save_pretrained(tmp_path / "model")
    words = ("--data", videos, "--frames", 5, "-o", tmp_path / "a.zarr")
    result = extract(f"transformers:{tmp_path / 'model'}", *words)
    assert result.exit_code == 1
    line = result.stderr.strip().splitlines()[-1]
    assert "takes clips of 3 frames" in line and "--frames 5 is not it" in line
