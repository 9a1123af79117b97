"""Tables in the format that their file's ending says."""

from __future__ import annotations

import gzip
import json
from datetime import date
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from vitsee_core.features.array_files import read_arrays, read_ids
from vitsee_core.pages.report.outputs import Outputs, check_outputs
from vitsee_core.tables.files import TABLE_ENDINGS
from vitsee_core.tables.formats import table_bytes
from vitsee_core.tables.results import Table, read_result
from vitsee_stores.errors import VitseeError


def table() -> Table:
    """Text that could harm, whole numbers with a gap, words beside numbers, floats."""
    rows = [
        {
            "store": "=a",
            "model": "m\x1b",
            "head": 0,
            "row": None,
            "l2": "0.5",
            "value": 0.1,
        },
        {"store": "b,\"'", "model": "m", "head": 1, "row": 3, "l2": "loo", "value": None},
        {"store": "5", "model": "m", "head": 2, "row": 4, "l2": None, "value": -1 / 3},
    ]
    return Table.from_rows(rows, notes={"seed": 7})


def test_the_text_of_each_format(tmp_path: Path) -> None:
    expected = (
        "store,model,head,row,l2,value\n"
        "'=a,m\\x1b,0,,0.5,0.1\n"
        '"b,""\'",m,1,3,loo,\n'
        "5,m,2,4,,-0.3333333333333333\n"
    )
    written = {}
    for ending in TABLE_ENDINGS:
        path = tmp_path / f"r{ending}"
        table().write(path)
        written[ending] = path.read_bytes()
    assert written[".csv"].decode() == expected
    assert gzip.decompress(written[".csv.gz"]).decode() == expected
    assert written[".tsv"].decode().splitlines()[2] == '"b,""\'"\tm\t1\t3\tloo\t'
    assert json.loads(written[".json"]) == [
        {
            "store": "=a",
            "model": "m\\x1b",
            "head": 0,
            "row": None,
            "l2": "0.5",
            "value": 0.1,
        },
        {"store": "b,\"'", "model": "m", "head": 1, "row": 3, "l2": "loo", "value": None},
        {"store": "5", "model": "m", "head": 2, "row": 4, "l2": None, "value": -1 / 3},
    ]
    assert len(written[".json"].splitlines()) == 5, "one record a line"


def test_parquet_has_types(tmp_path: Path) -> None:
    import pyarrow.parquet

    table().write(tmp_path / "r.parquet")
    read = pyarrow.parquet.read_table(tmp_path / "r.parquet")
    kinds = {field.name: str(field.type) for field in read.schema}
    assert {kinds.pop(n) for n in ("store", "model", "l2")} <= {"string", "large_string"}
    assert kinds == {"head": "int64", "row": "int64", "value": "double"}
    assert read.column("value").to_pylist() == [0.1, None, -1 / 3]
    assert read.column("l2").to_pylist() == ["0.5", "loo", None]


@pytest.mark.parametrize("ending", TABLE_ENDINGS)
def test_same_table_same_bytes_and_back(tmp_path: Path, ending: str) -> None:
    assert table_bytes(table().written, ending) == table_bytes(table().written, ending)
    path = tmp_path / f"r{ending}"
    table().write(path)
    path.with_name(path.name + ".json").write_text(json.dumps({"notes": {"seed": 7}}))
    read = Table.read(path)
    assert list(read.written.columns) == list(table().written.columns)
    for name in read.written.columns:
        if name != "l2":
            values = table()[name]
            shown = [
                v.replace("\x1b", r"\x1b") if isinstance(v, str) else v for v in values
            ]
            np.testing.assert_array_equal(read[name], np.array(shown, values.dtype))
    # Words beside numbers are words.
    assert read["l2"].tolist() == ["0.5", "loo", ""]
    assert read.notes == {"seed": 7}


@pytest.mark.parametrize("ending", [".json", ".parquet", ".tsv", ".csv.gz"])
def test_all_empty_and_no_rows(tmp_path: Path, ending: str) -> None:
    empty = Table({"store": np.array(["a"], object), "value": np.array([np.nan])})
    empty.write(tmp_path / f"e{ending}")
    assert np.isnan(Table.read(tmp_path / f"e{ending}")["value"][0])
    Table({"store": np.array([], object)}).write(tmp_path / f"n{ending}")
    with pytest.raises(VitseeError, match="has no rows"):
        Table.read(tmp_path / f"n{ending}")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("r.json", b"{}"),
        ("r.json", b"[1, 2]"),
        ("r.json", b'[{"a": 1}, 2]'),
        ("r.json", b"[" * 100_000),
        ("r.csv.gz", b"store,value\na,1\n"),
        ("r.csv.gz", gzip.compress(b"store,value\na,1\n", mtime=0)[:-9]),
        ("r.parquet", b"PAR1 not at all"),
        ("r.tsv", b"\xff\xfd"),
        ("r.csv", b"store,value\na\0,1\n"),
    ],
)
def test_what_is_not_what_its_ending_says(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(VitseeError, match=rf"{name} is no .*; expected a table that"):
        read_result(tmp_path / name)


@pytest.mark.parametrize("ending", [".parquet", ".csv.gz", ".json", ".csv"])
def test_damage_of_any_kind_is_one_line(
    tmp_path: Path, ending: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bytes flipped, cut out, put in, or the end cut off: the right reading or a refusal."""
    rng = np.random.default_rng(0)
    path = tmp_path / f"r{ending}"
    rows = {
        "store": ["a", "b,'=x"] * 30,
        "value": rng.standard_normal(60),
        "row": np.arange(60),
    }
    Table(rows).write(path)
    whole, refused = path.read_bytes(), 0
    for trial in range(120):
        data = bytearray(whole)
        first, last = sorted(rng.integers(0, len(data), 2))
        if trial % 4 == 0:
            del data[first:]
        elif trial % 4 == 1:
            del data[first:last]
        elif trial % 4 == 2:
            data[first:first] = rng.bytes(9)
        else:
            data[first] ^= 255
        path.write_bytes(data)
        try:
            read_result(path)
        except VitseeError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
    assert refused > 20 and capfd.readouterr().err == ""


def test_parquet_of_another_program(tmp_path: Path) -> None:
    """Numbers that name stores are text, as in a CSV; times and truth values are no numbers."""
    path, own = (
        tmp_path / "r.parquet",
        {"store": [5, 6], "site": ["a", "b"], "value": [1, 2]},
    )
    pl.DataFrame(
        {**own, "when": [date(2026, 1, 1)] * 2, "ok": [True, False]}
    ).write_parquet(path)
    table = read_result(path).table
    assert table["store"].tolist() == ["5", "6"] and table["value"].tolist() == [1.0, 2.0]
    for odd, kind in ((date(2026, 1, 1), "Date"), (True, "Boolean")):
        pl.DataFrame({**own, "value": [odd] * 2}).write_parquet(path)
        with pytest.raises(VitseeError) as caught:
            read_result(path)
        assert (
            str(caught.value)
            == f"{path}: column value is of type {kind}; expected numbers"
        )
    pl.DataFrame(
        {**own, "value": pl.Series(["1.5", "2"], dtype=pl.Categorical())}
    ).write_parquet(path)
    assert read_result(path).table["value"].tolist() == [1.5, 2.0]


@pytest.mark.parametrize("name", ["r.xlsx", "r", "r.csv.zip", ".csv", "r.gz", "r.csvx"])
def test_other_endings_are_refused_before_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        VitseeError, match=r"ends in \.csv, \.csv\.gz, \.tsv, \.json or \.parquet"
    ):
        check_outputs(Outputs(tmp_path / name))


def test_to_csv_takes_a_path(tmp_path: Path) -> None:
    table().to_csv(tmp_path / "r.csv")
    table().to_csv(str(tmp_path / "r.tsv"))
    assert (tmp_path / "r.csv").read_bytes() == table_bytes(table().written, ".csv")
    with pytest.raises(VitseeError, match="exists"):
        table().to_csv(tmp_path / "r.csv")
    table().with_frame(table().frame.head(1)).to_csv(tmp_path / "r.csv", force=True)
    assert len(Table.read(tmp_path / "r.csv")) == 1
    with pytest.raises(VitseeError, match=r"ends in \.csv, \.csv\.gz or \.tsv"):
        table().to_csv(tmp_path / "r.json")
    names = ["r.csv", "r.csv.json", "r.tsv", "r.tsv.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


# One table in the ways of other programs.
STORES = ["vit", "res, net", "x"]
VALUES = [1.5, None, -1234.25]
FOREIGN = {
    "commas": 'store,value\nvit,1.5\n"res, net",~\nx,-1234.25\n',
    "semicolons and decimal commas": "store;value\nvit;1,5\nres, net;~\nx;-1234,25\n",
    "semicolons and dots": "store;value\nvit;1.5\nres, net;~\nx;-1234.25\n",
    "bars": "store|value\nvit|1.5\nres, net|~\nx|-1234.25\n",
    "tabs in a .csv": "store\tvalue\nvit\t1.5\nres, net\t~\nx\t-1234.25\n",
    "CR": 'store,value\rvit,1.5\r"res, net",~\rx,-1234.25\r',
    "CR LF": 'store,value\r\nvit,1.5\r\n"res, net",~\r\nx,-1234.25\r\n',
    "no last line end": 'store,value\nvit,1.5\n"res, net",~\nx,-1234.25',
    "blank lines": '\n\nstore,value\n\nvit,1.5\n"res, net",~\n\nx,-1234.25\n\n',
    "blanks": 'store , value\n vit ,1.5 \n "res, net" , ~\nx,\t-1234.25\n',
    "a mark": '\ufeffstore,value\nvit,1.5\n"res, net",~\nx,-1234.25\n',
    "UTF-16": 'store,value\nvit,1.5\n"res, net",~\nx,-1234.25\n',
    "a line for Excel": "sep=;\r\nstore;value\r\nvit;1,5\r\nres, net;~\r\nx;-1234,25\r\n",
    "quotes": '"store","value"\n"vit","1.5"\n"res, net","~"\n"x","-1234.25"\n',
    "exponents": 'store,value\nvit,15e-1\n"res, net",~\nx,-1.23425E+03\n',
}


def foreign(way: str, **cells: str) -> bytes:
    """A table in the way of another program. cells: what stands for `store`, `value` and the
    cell `missing`."""
    text = FOREIGN[way].replace("~", cells.pop("missing", ""))
    for cell, other in cells.items():
        text = text.replace(cell, other)
    return text.encode("utf-16" if way == "UTF-16" else "utf-8")


@pytest.mark.parametrize("way", FOREIGN)
def test_tables_of_other_programs(tmp_path: Path, way: str) -> None:
    (tmp_path / "r.csv").write_bytes(foreign(way))
    frame = read_result(tmp_path / "r.csv").table.frame
    assert frame["store"].cast(pl.String).to_list() == STORES
    assert frame["value"].to_list() == VALUES


@pytest.mark.parametrize("way", FOREIGN)
def test_imports_read_as_tables_do(tmp_path: Path, way: str) -> None:
    path = tmp_path / "r.csv"
    path.write_bytes(foreign(way, store="id", missing="7"))
    arrays = read_arrays(path)
    assert arrays.values["r"].tolist() == [[1.5], [7.0], [-1234.25]]
    assert arrays.ids == read_ids(path)[0] == STORES
    path.write_bytes(foreign(way, store="id"))
    with pytest.raises(VitseeError, match="column value holds ''; expected numbers"):
        read_arrays(path)


def test_a_decimal_comma_is_none_where_commas_separate(tmp_path: Path) -> None:
    """`1,234` between quotes was 1.234; with thousands, dots and commas mixed, or in a table of
    tabs that vitsee did not write, it is said or text."""
    path = tmp_path / "r.csv"
    path.write_text('store,value\na,"1,234"\nb,2\n')
    with pytest.raises(
        VitseeError, match="column value has the text '1,234'; expected numbers"
    ):
        read_result(path)
    path.write_text('store,own\na,"1,234"\nb,2\n')
    assert read_result(path).table["own"].tolist() == ["1,234", "2"]
    for cells in (("1,5", "2.5"), ("1.234,5", "2"), ("1,234,567", "2"), ("1_000", "2")):
        path.write_text("store;value\n" + "".join(f"a;{cell}\n" for cell in cells))
        with pytest.raises(VitseeError, match="expected numbers"):
            read_result(path)


def test_words_of_other_programs_for_no_number(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("store,value\na,nan\nb,inf\nc,-Infinity\n")
    values = read_result(path).table["value"].tolist()
    assert np.isnan(values[0]) and values[1:] == [np.inf, -np.inf]
    for word in ("NA", "n/a", "null", "-", "#DIV/0!"):
        path.write_text(f"store,value\na,{word}\nb,1\n")
        with pytest.raises(
            VitseeError, match=f"column value has the text '{word}'; expected num"
        ):
            read_result(path)


def test_long_cells_and_headers(tmp_path: Path) -> None:
    """Python's own limit of 128 KiB was a traceback."""
    path, long = tmp_path / "r.csv", "x" * 200_000
    path.write_text(f'store,own\na,"{long}, y"\n')
    assert read_result(path).table["own"].tolist() == [f"{long}, y"]
    path.write_text(f"store,{long}\na,1\n")
    assert read_result(path).table[long].tolist() == [1]
    path.write_text(f'store,own\na,"{long}",1\n')
    with pytest.raises(VitseeError, match="row 1 has 3 cells, its header 2"):
        read_result(path)


def test_a_header_with_line_ends(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text('store,"a\nb"\nx,1\n')
    assert read_result(tmp_path / "r.csv").table["a\nb"].tolist() == [1]


def test_a_column_without_a_name_is_not_imported(tmp_path: Path) -> None:
    """pandas writes row numbers so; they would be a feature."""
    (tmp_path / "r.csv").write_text(",id,v\n0,a,1\n1,b,2\n")
    with pytest.raises(
        VitseeError, match=r"a column has no name, .*\(to_csv\(index=False\)"
    ):
        read_arrays(tmp_path / "r.csv")
