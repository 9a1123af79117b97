"""vitsee export --format saev: the bytes by a reader of the format, and saev itself where it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from tests.features import activations, vit_sites
from tests.stores import CNN, Site, write_model
from vitsee_cli.main import main
from vitsee_core.features.exporting_saev import export_saev
from vitsee_core.features.torch_dataset import TokenDataset
from vitsee_core.runtime.execution import Execution
from vitsee_stores import Store, TokenLayout
from vitsee_stores.errors import SiteError, VitseeError

Array = NDArray[Any]
N = 21
SITES = vit_sites(N, dim=4)
OUTS = ("blocks.0.out", "blocks.1.out")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    valid = np.ones(N, bool)
    valid[4] = False
    return write_model(tmp_path_factory.mktemp("saev") / "a.zarr", SITES, valid=valid)


def expected(sites: Any = OUTS, first: int = 0) -> Array:
    """(images, layers, tokens, dim) of the readable images, as stored."""
    return np.stack(
        [np.delete(np.asarray(SITES[name]), 4, 0)[:, first:] for name in sites], 1
    )


def read_vector(folder: Path, image: int, layer: int, token: int) -> Array:
    """One activation by the protocol's arithmetic: seek, and read D numbers."""
    about = json.loads((folder / "metadata.json").read_text())
    n_tokens = about["content_tokens_per_example"] + about["cls_token"]
    n_layers, dim = len(about["layers"]), about["d_model"]
    per_shard = about["max_tokens_per_shard"] // (n_tokens * n_layers)
    shard, row = divmod(image, per_shard)
    place = (
        (row * n_layers * n_tokens + about["layers"].index(layer) * n_tokens + token)
        * dim
        * 4
    )
    with open(folder / f"acts{shard:06d}.bin", "rb") as file:
        file.seek(place)
        return np.frombuffer(file.read(dim * 4), "<f4")


@pytest.mark.parametrize(
    ("tokens_per_shard", "jobs"), [(2_400_000, 1), (100, 3), (14, 1)]
)
def test_every_vector_is_where_the_protocol_says(
    store: Store, tmp_path: Path, tokens_per_shard: int, jobs: int
) -> None:
    use = Execution(jobs=jobs)
    folder = export_saev(
        store, OUTS, tmp_path, tokens_per_shard=tokens_per_shard, execution=use
    )
    wanted = expected()
    for i, layer, token in np.ndindex(wanted.shape[:3]):
        found = read_vector(folder, i, layer, token)
        np.testing.assert_array_equal(found, wanted[i, layer, token].astype(np.float32))
    shards = json.loads((folder / "shards.json").read_text())
    assert sum(shard["n_examples"] for shard in shards) == N - 1
    assert [shard["name"] for shard in shards] == sorted(
        p.name for p in folder.glob("*.bin")
    )
    sizes = {p.stat().st_size for p in folder.glob("*.bin")}
    assert len(sizes) == 1  # the last is padded: readers map every file in the full shape


def test_what_metadata_says(store: Store, tmp_path: Path) -> None:
    folder = export_saev(store, ["blocks.1.out"], tmp_path, tokens="patches")
    assert folder.parts[-3:-1] == ("saev", "shards")
    about = json.loads((folder / "metadata.json").read_text())
    text = json.dumps(about, separators=(",", ":")).encode()
    assert folder.name == hashlib.sha256(text).hexdigest()[:8]
    assert (about["layers"], about["cls_token"], about["d_model"]) == ([1], False, 4)
    assert (about["content_tokens_per_example"], about["n_examples"]) == (6, 20)
    assert about["protocol"] == "2.1"
    np.testing.assert_array_equal(
        np.fromfile(folder / "acts000000.bin", "<f4").reshape(20, 1, 6, 4),
        expected(OUTS[1:], 1).astype(np.float32),
    )
    ours = json.loads((folder / "vitsee.json").read_text())
    assert ours["images"] == np.delete(store.samples.id, 4).tolist()
    assert ours["sites"] == ["blocks.1.out"]


def test_registers_stay_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = TokenLayout(("reg0", "cls"), (2, 3), stride_px=(16.0, 16.0))
    x = activations(9, layout=layout).astype(np.float32)
    store = write_model(tmp_path / "a.zarr", {"blocks.0.out": (x, layout)})
    with caplog.at_level("INFO"):
        folder = export_saev(store, ["blocks.0.out"], tmp_path / "out")
    found = np.fromfile(folder / "acts000000.bin", "<f4").reshape(9, 1, 7, 4)
    np.testing.assert_array_equal(found[:, 0], x[:, 1:])
    assert "no place for reg0: left out" in caplog.text


@pytest.mark.parametrize(
    ("sites", "more", "message"),
    [
        (["pooled"], {}, "pooled has no grid of patches"),
        (
            OUTS,
            {"tokens": "mean"},
            "--tokens mean with --format saev; expected all or patches",
        ),
        (OUTS, {"tokens_per_shard": 13}, "an image has 14 tokens; 13 tokens per file"),
        (["blocks.9.out"], {}, "blocks.9.out"),
    ],
)
def test_refusals(
    store: Store, tmp_path: Path, sites: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(VitseeError, match=message):
        export_saev(store, sites, tmp_path, **more)
    assert not list(tmp_path.iterdir())


def test_sites_of_two_shapes_are_refused(tmp_path: Path) -> None:
    sites: dict[str, Site] = {
        "blocks.0.out": activations(6, 4),
        "blocks.1.out": (activations(6, 3, 0, CNN), CNN),
    }
    store = write_model(tmp_path / "a.zarr", sites)
    with pytest.raises(
        SiteError, match=r"has 7 tokens x 4 channels and blocks\.1\.out 4 x 3"
    ):
        export_saev(store, ["blocks.0.out", "blocks.1.out"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(store: Store, tmp_path: Path) -> None:
    words = ["export", str(store.path), "blocks.0.out,blocks.1.out", "--format", "saev"]
    words += ["-o", str(tmp_path)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    folder = Path(result.stdout.strip())
    assert {p.name for p in folder.iterdir()} == {
        "metadata.json", "shards.json", "vitsee.json", "acts000000.bin",
    }  # fmt: skip
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 1
    assert "exists; give another folder, or --force" in again.stderr
    assert CliRunner().invoke(main, [*words, "--force"]).exit_code == 0
    halves = CliRunner().invoke(main, [*words, "--dtype", "float16"])
    assert halves.exit_code == 1
    assert "its shards are float32" in halves.stderr


# ---------------------------------------------------------------- the packages themselves


def test_saev_reads_it(store: Store, tmp_path: Path) -> None:
    shards = pytest.importorskip("saev.data.shards", reason="saev is not installed")
    ordered = pytest.importorskip("saev.data.ordered")
    folder = export_saev(store, OUTS, tmp_path, tokens_per_shard=100)
    about = shards.Metadata.load(folder)
    assert (about.n_examples, about.layers, about.hash) == (N - 1, (0, 1), folder.name)
    shards.ShardInfo.load(folder).validate(folder)
    config = ordered.Config(shards=folder, tokens="content", layer=1, batch_size=7)
    batches = list(ordered.DataLoader(config))
    found = np.concatenate([np.asarray(batch["act"]) for batch in batches])
    np.testing.assert_array_equal(
        found, expected(OUTS[1:], 1).astype(np.float32).reshape(-1, 4)
    )


def test_overcomplete_trains_on_the_stream(store: Store) -> None:
    sae = pytest.importorskip("overcomplete.sae", reason="overcomplete is not installed")
    import torch

    torch.manual_seed(0)
    model = sae.TopKSAE(4, 16, top_k=3)
    loader = DataLoader(
        TokenDataset(store, "blocks.1.out", batch_size=12), batch_size=None
    )
    adam = torch.optim.Adam(model.parameters(), 1e-2)

    def loss(x: Any, x_hat: Any, *_: Any) -> Any:
        return ((x - x_hat) ** 2).mean()

    log = sae.train_sae(model, loader, loss, adam, nb_epochs=4, monitoring=1)
    assert log["avg_loss"][-1] < log["avg_loss"][0]
