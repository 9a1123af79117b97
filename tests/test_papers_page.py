"""docs/guide/papers.md: written from a table whose commands run and whose checkpoints exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import papers_page
import pytest
import timm
from paper_figures import PAPERS, Paper

from tests.every_command import vitsee
from vitsee_core.demo.coco import write_coco
from vitsee_core.demo.davis import write_davis
from vitsee_core.demo.revisited import write_revisited
from vitsee_core.demo.spair import write_spair

TITLES = [paper.title.split(" et al.")[0] for paper in PAPERS]
SETS = {
    "coco": write_coco,
    "DAVIS": write_davis,
    "roxford5k": write_revisited,
    "SPair-71k": write_spair,
}


def test_the_page_is_what_its_script_writes() -> None:
    assert papers_page.PAGE.read_text() == papers_page.page()


def test_every_checkpoint_exists() -> None:
    known = {*timm.list_pretrained(), *timm.list_models()}
    named = [made.model.split()[0] for paper in PAPERS for made in paper.stores.values()]
    assert [name for name in named if name not in known] == []


@pytest.fixture(scope="module", params=PAPERS, ids=TITLES)
def paper(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Paper]:
    """A paper, in whose folder its stores are made from the demo's models."""
    made: Paper = request.param
    folder = tmp_path_factory.mktemp("paper")
    needed = " ".join(store.options for store in made.stores.values())
    with contextlib.chdir(folder):
        for name, write in SETS.items():
            if name in needed:
                write(Path(name))
        for name, store in made.stores.items():
            vitsee(*papers_page.stand_in(name, store))
        yield made


@pytest.mark.slow
def test_every_figure_is_made(paper: Paper) -> None:
    stores = {path.name for path in Path().glob("*.zarr")}
    used = set()
    for number, figure in enumerate(paper.figures):
        for part, command in enumerate(figure.commands):
            words = command.split()
            used |= {word.split("=")[-1] for word in words if word.endswith(".zarr")}
            output = Path(words[words.index("-o") + 1] if "-o" in words else "table.csv")
            own = [] if "-o" in words else ["-o", output]
            picture = Path(f"{number}-{part}.png")
            vitsee(*words, *own, "--png", picture, "--force")
            assert output.stat().st_size and picture.stat().st_size, command
    assert used == stores
