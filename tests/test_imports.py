"""vitsee import: stores of arrays that others computed."""

from __future__ import annotations

import csv
import io
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import safetensors.numpy
import torch
from click.testing import CliRunner, Result
from numpy.typing import NDArray

import vitsee
from tests.stores import VIT, write_sites
from vitsee_cli.main import main
from vitsee_core.features.array_files import read_arrays
from vitsee_stores import Store, VitseeError, open_store

N = 30
RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(N, 5)).astype(np.float32)
TOKENS = RNG.normal(size=(N, 7, 4)).astype(np.float32)  # a class token and 2 x 3 patches
IDS = [f"image{i}" for i in range(N)]


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["import", *map(str, args)])


def imported(*args: object) -> Store:
    result = run(*args)
    assert result.exit_code == 0, result.output
    path = Path(str(args[[*map(str, args)].index("-o") + 1]))
    assert CliRunner().invoke(main, ["validate", str(path)]).exit_code == 0
    return open_store(path)


@pytest.fixture
def like(tmp_path: Path) -> Store:
    """The same images in another order, one of them unreadable."""
    turned = np.arange(N)[::-1]
    valid = np.arange(N) != 4
    return write_sites(
        tmp_path / "like.zarr", {"blocks.0.out": TOKENS[turned]}, layout=VIT, slab=8,
        ids=[IDS[i] for i in turned], valid=valid, labels=turned % 3,
    )  # fmt: skip


def written(folder: Path, ending: str) -> Path:
    """VECTORS in a file of this kind."""
    path = folder / f"x{ending}"
    if ending == ".npy":
        np.save(path, VECTORS)
    elif ending == ".npz":
        np.savez(path, x=VECTORS)
    elif ending == ".pt":
        torch.save({"x": torch.from_numpy(VECTORS)}, path)
    elif ending == ".safetensors":
        safetensors.numpy.save_file({"x": VECTORS}, path)
    elif ending == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"id": IDS, "x": VECTORS.tolist()}), path)
    else:
        table(
            path,
            ["id", *"abcde"],
            [[i, *row] for i, row in zip(IDS, VECTORS, strict=True)],
        )
    return path


def table(path: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(
            [names, *rows]
        )
    return path


def ids(folder: Path, names: Sequence[str] = IDS) -> Path:
    path = folder / "ids.txt"
    path.write_text("".join(f"{name}\n" for name in names))
    return path


@pytest.mark.parametrize(
    "ending", [".npy", ".npz", ".pt", ".safetensors", ".csv", ".tsv", ".parquet"]
)
def test_every_kind_of_file_gives_the_same(ending: str, tmp_path: Path) -> None:
    store = imported(
        written(tmp_path, ending), "--ids", ids(tmp_path), "-o", tmp_path / "s.zarr"
    )
    assert [*store.sites] == ["x"] and store.samples.id.tolist() == IDS
    assert np.array_equal(store.pooled("x")[:], VECTORS)
    assert store.samples.hash.all() and len({*store.samples.hash.tolist()}) == N


def test_tokens_of_other_images_in_their_order(like: Store, tmp_path: Path) -> None:
    """Rows are found by their ids; images without one are not valid; the stores pair."""
    np.save(tmp_path / "t.npy", TOKENS[3:])
    known = ids(tmp_path, IDS[3:])
    store = imported(
        tmp_path / "t.npy", "--ids", known, "--like", like.path, "--prefix", "cls",
        "--grid", "2x3", "-o", tmp_path / "s.zarr",
    )  # fmt: skip
    assert store.samples.id.tolist() == IDS[::-1] and store.valid.sum() == N - 3
    assert np.array_equal(store.samples.label, like.samples.label)
    there = store.valid
    assert np.array_equal(store.acts("t", tokens="all")[:][there], TOKENS[::-1][there])
    mean = TOKENS[::-1, 1:].astype(np.float64).mean(1)
    np.testing.assert_allclose(
        store.pooled("t", "mean")[:][there], mean[there], rtol=1e-6
    )
    assert np.array_equal(store.pooled("t", "cls")[:][there], TOKENS[::-1, 0][there])
    cka = vitsee.cka(like, store, tokens="all")
    assert cka["value"][0] == pytest.approx(1, abs=1e-6)
    assert cka["n_images"][0] == N - 4


def test_rows_in_the_order_of_a_store(like: Store, tmp_path: Path) -> None:
    """Of all its images, or of the readable ones, as vitsee export writes them."""
    valid = like.valid
    for name, rows in (("all", VECTORS), ("valid", VECTORS[valid])):
        np.save(tmp_path / f"{name}.npy", rows)
        store = imported(
            tmp_path / f"{name}.npy", "--like", like.path, "-o", tmp_path / f"{name}.zarr"
        )
        assert np.array_equal(store.valid, valid)
        assert np.array_equal(store.pooled(name)[:][valid], VECTORS[valid])


def test_columns_with_labels_are_probed(tmp_path: Path) -> None:
    """Neural responses in a table: words are classes; the scores are those of the numbers."""
    classes = np.array([*"abc"])[np.arange(N) % 3]
    rows = [[i, c, *v] for i, c, v in zip(IDS, classes, VECTORS, strict=True)]
    path = table(tmp_path / "responses.csv", ["id", "label", *"vwxyz"], rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as spreadsheets write it
    store = imported(path, "--as", "it", "-o", tmp_path / "it.zarr")
    assert store.manifest.class_names == ["a", "b", "c"]
    assert store.samples.label.tolist() == [i % 3 for i in range(N)]
    assert store.manifest.info["columns"] == {"responses": [*"vwxyz"]}
    found = vitsee.probe(store, holdout=0.4, l2=[1.0])
    other = write_sites(tmp_path / "o.zarr", {"it": VECTORS}, labels=np.arange(N) % 3, ids=IDS,
                        groups=("blocks",), order="dataset")  # fmt: skip
    expected = vitsee.probe(other, holdout=0.4, l2=[1.0])
    assert np.array_equal(found["value"], expected["value"])


def test_labels_and_ids_of_a_table_that_are_missing(tmp_path: Path) -> None:
    columns = {"id": ["a", "b", "c"], "label": [1, None, 0], "x": [0.0, 1.0, 2.0]}
    table = tmp_path / "x.parquet"
    polars.DataFrame(columns).write_parquet(table)
    store = imported(table, "-o", tmp_path / "x.zarr")
    assert store.samples.label.tolist() == [1, -1, 0]
    assert store.class_names is None
    columns["id"] = ["a", None, "c"]
    polars.DataFrame(columns).write_parquet(table)
    result = run(table, "-o", tmp_path / "y.zarr")
    assert result.exit_code == 1
    assert "x.parquet: row 1 has no id; expected one a row" in result.stderr


def test_ids_behind_a_byte_order_mark(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    ids = tmp_path / "ids.txt"
    ids.write_text("a\nb\n", "utf-8-sig")
    store = imported(tmp_path / "x.npy", "--ids", ids, "-o", tmp_path / "x.zarr")
    assert store.samples.id.tolist() == ["a", "b"]


def test_the_same_again_changes_nothing(tmp_path: Path) -> None:
    args = (written(tmp_path, ".npy"), "--ids", ids(tmp_path), "-o", tmp_path / "s.zarr")
    before = imported(*args).manifest.store_id
    assert imported(*args).manifest.store_id == before
    np.save(tmp_path / "x.npy", VECTORS + 1)
    result = run(*args)
    assert result.exit_code == 1 and "arrays" in result.stderr
    assert np.array_equal(open_store(tmp_path / "s.zarr").pooled("x")[:], VECTORS)


def array(folder: Path, values: NDArray[Any], name: str = "x") -> Path:
    np.save(folder / f"{name}.npy", values)
    return folder / f"{name}.npy"


def changed(place: tuple[int, ...], value: float) -> NDArray[Any]:
    values = VECTORS.astype(np.float64)
    values[place] = value
    return values


SIGNALLING = VECTORS.copy()  # a NaN that numpy warns of when it is cast
SIGNALLING.view(np.uint32)[2, 1] = 0x7F800001
REFUSED: list[tuple[Any, str, str]] = [
    (VECTORS, "", "give --ids FILE, or --like STORE"),
    (VECTORS[:9], "--ids IDS", "has 30 ids for 9 rows"),
    (VECTORS[:, 0], "--ids IDS", "has 1 axes of float32; expected num"),
    (np.zeros((N, 2), "U3"), "--ids IDS", "axes of <U3; expected numb"),
    (np.zeros((0, 2)), "--ids IDS", "x has no rows"),
    (np.zeros((N, 2, 2, 2)), "--ids IDS", "x has 4 axes; expected (im"),
    (TOKENS, "--ids IDS", "7 tokens an image; expected a square"),
    (TOKENS, "--ids IDS --grid 3x3", "expected 3 x 3 of --grid"),
    (TOKENS, "--ids IDS --grid 3", "--grid 3; expected ROWSxCOLS"),
    (
        changed((2, 1), np.nan),
        "--ids IDS",
        "row 2 (image2) holds numbers that are not finite; leave that image out\n",
    ),
    (
        SIGNALLING,
        "--ids IDS",
        "holds numbers that are not finite; leave that image out\n",
    ),
    (
        changed((2, 1), 1e39),
        "--ids IDS",
        "beyond float32; leave that image out, or divide",
    ),
    (VECTORS, "--ids IDS --as a,b", "given 2 times for 1 arrays"),
    (np.array([{}], object), "--ids IDS", "no .npy file of numbers"),
    (np.zeros((N, 0)), "--ids IDS", "x is (30, 0); expected a number an image"),
    ("none.npy", "--ids IDS", "none.npy cannot be read: no such file"),
    ("junk.npz", "--ids IDS", "junk.npz cannot be read as .npz: it is no zip file"),
    (
        "junk.safetensors",
        "--ids IDS",
        "junk.safetensors is no .safetensors file of numbers",
    ),
    ("junk.pt", "--ids IDS", "junk.pt is no file of tensors alone"),
    (
        "junk.csv",
        "",
        "junk.csv is no .csv file of numbers: it is not text in UTF-8 (byte 0)",
    ),
    (
        VECTORS,
        "--ids JUNK",
        "junk.csv is no .csv table: it is not text in UTF-8 (byte 0)",
    ),
    ("junk.mat", "--ids IDS", "junk.mat is refused: exp"),
    ([["id", "a"], ["i", "word"]], "", "column a holds 'word'"),
    ([["id", "a"], ["i", 1], ["i", 2]], "", "two rows have the id"),
    ([["id", "a"], ["i", 1, 2]], "", "row 1 has 3 cells, its heade"),
    ([["id"], ["i"]], "", "has no array; expected one of numbers"),
    (VECTORS, "--ids OTHER --like LIKE", "has one of these ids"),
    (VECTORS[:7], "--like LIKE", "7 rows for 30 images of like"),
]


@pytest.mark.parametrize(
    ("given", "more", "said"), REFUSED, ids=[said for *_, said in REFUSED]
)
def test_what_is_refused(
    given: Any, more: str, said: str, like: Store, tmp_path: Path
) -> None:
    if isinstance(given, str):
        path = tmp_path / given
        if given.startswith("junk"):
            path.write_bytes(b"\xffjunk")
    elif isinstance(given, list):
        path = table(tmp_path / "t.csv", given[0], given[1:])
    else:
        path = array(tmp_path, given)
    (tmp_path / "other.txt").write_text("".join(f"x{i}\n" for i in range(N)))
    (tmp_path / "junk.csv").write_bytes(b"\xffid,label\n")
    places = {"IDS": ids(tmp_path), "LIKE": like.path, "OTHER": tmp_path / "other.txt"}
    places["JUNK"] = tmp_path / "junk.csv"
    options = (places.get(word, word) for word in more.split())
    result = run(path, *options, "-o", tmp_path / "s.zarr")
    assert result.exit_code == 1 and said in result.stderr, result.stderr
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "s.zarr").exists()


def with_header(text: str) -> bytes:
    """An .npy file with this text for its header, and the numbers of VECTORS."""
    return (
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", len(text))
        + text.encode()
        + VECTORS.tobytes()
    )


CUT = "{'descr': '<f4', 'fortran_order': False, 'shape': (30, 5), \n"
HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (30, 500000000000000), }\n"


@pytest.mark.parametrize(
    ("ending", "content", "said"),
    [
        (".npy", with_header(CUT), "x.npy is no .npy file of numbers"),
        (".npy", b"", "x.npy is no .npy file of numbers"),
        (".npy", with_header(HUGE), "x.npy is no .npy file of numbers"),
        (".npz", with_header(CUT), "x.npz cannot be read as .npz"),
        (".npz", with_header(HUGE), "x.npz cannot be read as .npz: Unable to allocate"),
        (".npz", b"no array", "x in it is no array"),
        (
            ".csv",
            b"id,a\ni,\0" + b"9" * 200_000,
            "x.csv is no .csv file of numbers: it holds zero",
        ),
    ],
)
def test_damaged_headers(ending: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{ending}"
    if ending == ".npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", content)
    else:
        path.write_bytes(content)
    result = run(path, "--ids", ids(tmp_path), "-o", tmp_path / "s.zarr")
    assert result.exit_code == 1 and said in result.stderr, result.output
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "s.zarr").exists()


@pytest.mark.parametrize(
    "ending", [".npy", ".npz", ".pt", ".safetensors", ".csv", ".parquet"]
)
def test_any_damage_is_a_line(
    ending: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Bytes changed, cut out, repeated or cut off, half of them among the first or last 200; in an
    archive, with checksums that fit."""
    whole = written(tmp_path, ending).read_bytes()
    rng = np.random.default_rng(len(whole))
    refused = 0
    for turn in range(60):
        path = tmp_path / f"{turn}{ending}"
        if ending in (".npz", ".pt") and turn % 3:
            with (
                zipfile.ZipFile(io.BytesIO(whole)) as old,
                zipfile.ZipFile(path, "w") as new,
            ):
                for name in old.namelist():
                    member = old.read(name)
                    hit = name.endswith(("x.npy", "data.pkl"))
                    new.writestr(name, damaged(member, rng) if hit else member)
        else:
            path.write_bytes(damaged(whole, rng))
        try:
            read_arrays(path)
        except VitseeError:
            refused += 1
    assert refused > 10 and not recwarn.list


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        near = len(data) if rng.random() < 0.5 else min(200, len(data))
        at = (
            int(rng.integers(near))
            if rng.random() < 0.5
            else len(data) - 1 - rng.integers(near)
        )
        n = int(rng.choice([1, 4, 30]))
        kind = rng.integers(5)
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            data[at : at + n] = rng.bytes(n)
        elif kind == 2 and len(data) > n:
            del data[at : at + n]
        elif kind == 3:
            data[at:at] = bytes(data[:n])
        elif at > 0:
            del data[at:]
    return bytes(data)


def test_lists_of_different_lengths(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"id": ["a", "b"], "x": [[1.0], [1.0, 2.0]]}), tmp_path / "x.parquet"
    )
    result = run(tmp_path / "x.parquet", "-o", tmp_path / "s.zarr")
    assert result.exit_code == 1, result.output
    assert "column x holds lists of different lengths" in result.stderr


def test_a_tensor_with_more_numbers_than_its_file(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(N, 1).expand(N, 1 << 40)}, tmp_path / "x.pt")
    result = run(tmp_path / "x.pt", "--ids", ids(tmp_path), "-o", tmp_path / "s.zarr")
    assert result.exit_code == 1 and "expected all of its numbers" in result.stderr, (
        result.output
    )


def test_a_file_that_would_run_code(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(2, 2), "code": Evil()}, tmp_path / "x.pt")
    result = run(tmp_path / "x.pt", "--ids", ids(tmp_path), "-o", tmp_path / "s.zarr")
    assert result.exit_code == 1 and "is no file of tensors alone" in result.stderr
    assert not (tmp_path / "ran").exists()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def test_stores_of_two_makers_are_not_train_and_test(tmp_path: Path) -> None:
    stores = []
    for name, model in (("a", []), ("b", []), ("c", ["--model", "a"])):
        names = table(tmp_path / f"{name}.csv", ["id", "label"],
                      [[f"{name}{i}", i % 3] for i in range(N)])  # fmt: skip
        path = array(tmp_path, VECTORS, name)
        stores.append(
            imported(
                path, "--as", "x", "--ids", names, *model, "-o", tmp_path / f"{name}.zarr"
            )
        )
    with pytest.raises(VitseeError, match=r"different models \(a against b\)"):
        vitsee.knn(stores[0], stores[1])
    assert (
        vitsee.knn(stores[0], stores[2], ks=[1]).filter(metric="top1")["value"] == 1
    ).all()
