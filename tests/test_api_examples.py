"""Every name of `vitsee` has an example in its docstring, which runs as it stands there."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import vitsee
from tests.recipes import run_blocks
from vitsee_core.runtime import registry

NAMES = [*vitsee._MODULE_OF_NAME, *registry.builtin_names()]
# The stores of examples that README's first look does not make; the recipes of docs/ make them.
STORES = """<!-- tested -->
```sh
python -c "from vitsee_core.demo.class_maps import write_class_maps; write_class_maps('sets')"
python -c "from vitsee_core.demo.coco import write_coco; write_coco('scenes')"
python -c "from vitsee_core.demo.spair import write_spair; write_spair('clothes')"
python -c "from vitsee_core.demo.davis import write_davis; write_davis('videos')"
vitsee extract demo:vit --data sets/VOC2012/JPEGImages --attention none -o voc.zarr
vitsee extract demo:vit --data scenes/val2017 --attention rows -o scenes.zarr
vitsee extract demo:vit --data clothes/JPEGImages --crop-mode border --fill black --crop-pct 1 \\
    -o vit-clothes.zarr
vitsee extract demo:vit --data videos/JPEGImages/480p --only videos/ImageSets/2017/val.txt \\
    --order dataset --crop-mode squash -o normal.zarr
vitsee extract demo:vit --data demo:test --images 200 --sites blocks.0.attn.heads -o heads.zarr
vitsee extract demo:vit --data demo:test --images 200 --ablate-skip blocks.2.mlp -o no-skip.zarr
vitsee extract demo:vit --data demo:test --images 50 --sites blocks --erf 50 -o seen.zarr
vitsee extract demo:vit --data demo:test --images 60 --sites blocks --sites head --sites residual \\
    -o branches.zarr
```
"""


def examples_of(name: str) -> list[doctest.Example]:
    docstring = inspect.getdoc(getattr(vitsee, name)) or ""
    return doctest.DocTestParser().get_examples(docstring, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example(name: str) -> None:
    sources = [example.source for example in examples_of(name)]
    assert sources[:1] == ["import vitsee\n"]
    assert any(f"vitsee.{name}" in source for source in sources), (
        f"no example of vitsee.{name} calls it"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_described_once(name: str) -> None:
    docstring = inspect.getdoc(getattr(vitsee, name)) or ""
    block = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", docstring, re.DOTALL | re.MULTILINE)
    described = re.findall(r"^    (\w+):", block[1], re.MULTILINE) if block else []
    assert len(described) == len({*described}), described


@pytest.fixture(scope="session")
def example_stores(first_look: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    for store in first_look.glob("*.zarr"):
        (folder / store.name).symlink_to(store)
    run_blocks(STORES, folder)
    return folder


@pytest.mark.slow
def test_examples_run(example_stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(example_stores)
    failures = []
    for name in NAMES:
        test = doctest.DocTest(
            examples_of(name), {}, name, filename=None, lineno=0, docstring=None
        )
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        text: list[str] = []
        runner.run(test, out=text.append)
        plt.close("all")
        if text:
            failures.append("".join(text))
    assert not failures, "\n".join(failures)
