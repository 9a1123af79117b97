"""The pictures of README and docs/: each is made by tools/pictures.py, of what the demo leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from pictures import ELSEWHERE, MOST_BYTES, PICTURES, REAL

from vitsee_cli.main import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    path.read_text()
    for folder in ("analyses", "guide")
    for path in (ROOT / "docs" / folder).glob("*.md")
]
SHOWN = re.findall(r"\]\(\.\./([\w-]+)\.png\)", "\n".join(PAGES))
IN_README = re.findall(r"\]\(docs/([\w-]+)\.png\)", (ROOT / "README.md").read_text())


def test_each_picture_is_made_by_a_script_and_shown_by_its_page() -> None:
    made = [picture.name for picture in (*PICTURES, *REAL)]
    assert sorted(SHOWN) == sorted([*made, *ELSEWHERE])
    assert sorted(path.stem for path in (ROOT / "docs").glob("*.png")) == sorted(SHOWN)
    assert 8 <= len(IN_README) == len({*IN_README}) and {*IN_README} <= {*SHOWN}
    for name in made:
        assert (ROOT / "docs" / f"{name}.png").stat().st_size <= MOST_BYTES


@pytest.mark.slow
def test_pictures_are_made_of_what_the_demo_leaves(tmp_path: Path) -> None:
    planned = CliRunner().invoke(
        main, ["demo", "--quick", "-o", str(tmp_path / "d"), "--dry-run"]
    )
    assert planned.exit_code == 0, planned.output
    there = set(re.findall(r"-o \S*/d/(\S+)", planned.stdout))
    for picture in PICTURES:
        for line in picture.commands:
            read, _, made = line.rpartition(" -o ")
            needed = set(
                re.findall(r"(?:stores|results|more)/[\w-]+\.(?:zarr|csv)", read)
            )
            assert (needed and needed <= there) or line.startswith("extract "), line
            there |= {made.split()[0], *re.findall(r"--table (\S+)", read)}
        assert picture.result in there, picture.name
