"""`vitsee study` and `vitsee demo`: what they do, do again, and go on without."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import pytest
import timm
from timm.models import save_for_hf

from tests.command_line import invoke as vitsee
from tests.command_line import one_line
from tests.explored_pages import read_page
from tests.faults.fuzz import DEEP, Changes
from tests.studies import NO_ATTENTION, cnn, model, study
from vitsee_cli.main import main
from vitsee_core.analyses import attn_dist
from vitsee_core.pages.report.overview import paper_numbers
from vitsee_core.pages.report.study_record import (
    failures,
    read_study,
    read_study_file,
    remarks,
)
from vitsee_core.study import catalogue
from vitsee_core.study import demo as demo_module
from vitsee_core.study.catalogue import SurveyedModel, needs_of_analyses, survey
from vitsee_core.study.demo import demo_study, tour, with_sets
from vitsee_core.study.planning import check_choice, plan
from vitsee_core.study.record import (
    BEGUN,
    DONE,
    FAILED,
    LEFT_OUT,
    Record,
    begin,
    make_folders,
)
from vitsee_core.study.running import Outcome, Stopped, carry_out
from vitsee_core.study.steps import Plan, Step
from vitsee_core.tables.results import Table
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

# ------------------------------------------------------------------------------------ running


class Commands:
    """Performs steps by writing their outputs; `fails`: name -> (code, reason)."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.fails: dict[str, tuple[int, str]] = {}

    def __call__(self, step: Step) -> Outcome:
        self.done.append(step.name)
        if step.name in self.fails:
            return Outcome(*self.fails[step.name])
        for path in step.outputs:
            path.write_text(f"made by {step.line}")
        return Outcome(0)


@pytest.fixture
def chain(tmp_path: Path) -> list[Step]:
    """a -> b -> c, and d by itself."""
    a, b, c, d = (tmp_path / f"{name}.csv" for name in "abcd")
    return [
        Step("a", ("a",), (), (a,)), Step("b", ("b",), (a,), (b,)),
        Step("c", ("c",), (b,), (c,)), Step("d", ("d",), (), (d,)),
    ]  # fmt: skip


def test_finished_steps_are_not_done_again(tmp_path: Path, chain: list[Step]) -> None:
    perform, said = Commands(), list[str]()
    assert carry_out(chain, Record(tmp_path / "study.json"), perform, said.append) == []
    assert perform.done == ["a", "b", "c", "d"] and said[1].startswith("[2/4] b: ")

    def again(changed: list[Step] = chain) -> list[str]:
        perform.done.clear()
        assert carry_out(changed, Record.read(tmp_path), perform, said.append) == []
        return perform.done

    assert again() == [] and said[-1] == "[4/4] d: done before"
    (tmp_path / "a.csv").write_text("other")
    assert again() == ["a"], (
        "its own output was changed; what it makes again is as it was"
    )
    (tmp_path / "c.csv").unlink()
    assert again() == ["c"]
    other = [Step("a", ("a", "--new"), (), chain[0].outputs), *chain[1:]]
    assert again(other) == ["a", "b"], "b's input is another now; c's is not"
    (tmp_path / "study.json").write_text("{")
    assert again(other) == ["a", "b", "c", "d"], (
        "without a record nothing is known to be done"
    )


def test_a_step_that_fails_does_not_stop_the_others(
    tmp_path: Path, chain: list[Step]
) -> None:
    perform, said = Commands(), list[str]()
    perform.fails["a"] = (1, "no such thing")
    failed = carry_out(chain, Record(tmp_path / "study.json"), perform, said.append)
    assert [step.name for step in failed] == ["a", "b", "c"] and perform.done == [
        "a",
        "d",
    ]
    assert said[:2] == [
        "[1/4] a: failed: no such thing",
        "[2/4] b: left out: a.csv was not made",
    ]
    record = json.loads((tmp_path / "study.json").read_text())["steps"]
    assert [record[name]["status"] for name in "abcd"] == [
        FAILED,
        LEFT_OUT,
        LEFT_OUT,
        DONE,
    ]
    assert record["a"]["reason"] == "no such thing"
    perform.fails.clear()
    perform.done.clear()
    assert carry_out(chain, Record.read(tmp_path), perform, said.append) == []
    assert perform.done == ["a", "b", "c"]


def test_a_step_that_takes_what_is_there(tmp_path: Path, chain: list[Step]) -> None:
    """And nothing that an earlier study left where this one's step failed."""
    a, b, c, d = chain
    words = ("best-layer", str(a.outputs[0]), str(d.outputs[0]), "-o", "best.csv")
    inputs = (a.outputs[0], d.outputs[0])
    best = Step("best", words, inputs, (tmp_path / "best.csv",), partial=True)
    steps, perform = [a, d, best], Commands()
    assert carry_out(steps, Record(tmp_path / "study.json"), perform, print) == []
    said = list[str]()
    perform.fails["a"] = (1, "no such thing")
    (tmp_path / "study.json").unlink()
    failed = carry_out(steps, Record.read(tmp_path), perform, said.append)
    assert [step.name for step in failed] == ["a"] and a.outputs[0].exists()
    entry = json.loads((tmp_path / "study.json").read_text())["steps"]["best"]
    assert entry["command"] == f"vitsee best-layer {d.outputs[0]} -o best.csv"
    assert [step.name for step in carry_out([b, c], Record.read(tmp_path), perform, said.append,
                                            before=failed)] == ["b", "c"]  # fmt: skip
    assert said[-2] == "[1/2] b: left out: a.csv was not made"
    perform.fails["d"] = (1, "no such thing")
    (tmp_path / "study.json").unlink()
    assert len(carry_out(steps, Record.read(tmp_path), perform, said.append)) == 3
    assert said[-1] == "[3/3] best: left out: a.csv, d.csv was not made"


@pytest.mark.parametrize("code", [75, 130, 143])
def test_a_signal_ends_it(tmp_path: Path, chain: list[Step], code: int) -> None:
    perform = Commands()
    perform.fails["b"] = (code, "interrupted")
    with pytest.raises(Stopped):
        carry_out(chain, Record(tmp_path / "study.json"), perform, print)
    assert perform.done == ["a", "b"]
    steps = json.loads((tmp_path / "study.json").read_text())["steps"]
    assert {name: entry["status"] for name, entry in steps.items()} == {
        "a": DONE,
        "b": BEGUN,
    }


def test_a_step_that_does_not_apply_is_no_failure(
    tmp_path: Path, chain: list[Step]
) -> None:
    """What an earlier study left at its place is not taken for its result."""
    a, *_, d = chain
    after = Step("after", ("after",), a.outputs, (tmp_path / "after.csv",))
    a.outputs[0].write_text("of an earlier study")
    said, record = list[str](), Record(tmp_path / "study.json")

    def perform(step: Step) -> Outcome:
        return Outcome(1, "no such part", applies=False) if step is a else Outcome(0)

    failed = carry_out([a, d, after], record, perform, said.append)
    assert said[0] == "[1/3] a: left out: no such part" and failed == [after]
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["left_out"] == {"a": "no such part"}
    assert found["steps"]["a"]["status"] == LEFT_OUT


def test_the_record_says_what_was_asked_for(tmp_path: Path) -> None:
    asked = study(tmp_path / "out", images=5)
    make_folders(asked)
    begin(asked, ["vitsee", "study"], Plan(left_out={"knn": "no labels"}))
    found = json.loads((tmp_path / "out" / "study.json").read_text())
    assert found["images"] == 5 and found["models"] == {
        "vit": "demo:vit",
        "cnn": "demo:cnn",
    }
    assert found["left_out"] == {"knn": "no labels"} and "vitsee" in found["versions"]
    (tmp_path / "file").write_text("")
    with pytest.raises(VitseeError, match="cannot make the folder"):
        make_folders(study(tmp_path / "file"))
    for text in ("{", "[]", '{"trials": 3}'):
        (asked.folder / "study.json").write_text(text)
        with pytest.raises(VitseeError, match="is no record of a study; choose another"):
            make_folders(asked)


def test_what_was_found_of_models_counts_for_the_same_code_and_names(
    tmp_path: Path,
) -> None:
    asked, found = study(tmp_path / "out"), [model("vit"), cnn("cnn")]
    make_folders(asked)
    begin(asked, ["vitsee", "study"], Plan(), found)
    record = Record.read(asked.folder)
    assert record.surveyed(asked.models) == found
    assert record.surveyed({"other": "demo:vit"}) == [model("other", name="demo:vit")]
    assert record.surveyed({**asked.models, "new": "demo:new"}) is None
    for change in (
        {"versions": {**record.survey.versions, "torch": "1.0"}},
        {"models": {**record.survey.models, "demo:vit": {"label": "vit"}}},
        {
            "models": {
                **record.survey.models,
                "demo:vit": {**asdict(found[0]), "flops": "many"},
            }
        },
        {},
    ):
        text = json.loads((asked.folder / "study.json").read_text())
        text["survey"] = {**text["survey"], **change} if change else {}
        (tmp_path / "study.json").write_text(json.dumps(text))
        assert Record.read(tmp_path).surveyed(asked.models) is None


@pytest.mark.slow
def test_models_are_made_only_where_a_store_is_not_as_its_step_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "study",
        "demo:vit",
        "--data",
        "demo:test",
        "--images",
        "4",
        "-o",
        tmp_path / "out",
    ]
    words += ["--analyses", "weights"]
    assert vitsee(*words).exit_code == 0
    made = list[str]()
    real = catalogue.survey

    def counted(label: str, *more: Any) -> SurveyedModel:
        made.append(label)
        return real(label, *more)

    monkeypatch.setattr(catalogue, "survey", counted)
    before = (tmp_path / "out" / "study.json").read_text()
    again = vitsee(*words)
    assert again.exit_code == 0 and made == [], again.output
    after = json.loads((tmp_path / "out" / "study.json").read_text())
    assert after["survey"] == json.loads(before)["survey"]
    assert vitsee(*words, "--images", "5").exit_code == 2 and made == []
    words[words.index("4")] = "5"
    assert vitsee(*words).exit_code == 0 and made == ["vit"]


def test_changed_records_are_read_or_not_ours(tmp_path: Path) -> None:
    """300 changes of a study.json, among them lists in lists and cut text: never an error."""
    step = {
        "status": DONE,
        "command": "c",
        "seconds": 1.5,
        "inputs": {},
        "outputs": {"r": "0"},
    }
    printed = {"what": "w", "paper": 1.5, "result": "cka", "where": {"metric": "x"}}
    section = {"title": "Figure 1", "note": "", "results": ["cka"], "printed": [printed]}
    whole = {
        "command": ["vitsee"], "models": {"a": "b"}, "data": "d", "left_out": {"knn": "why"},
        "sections": [section], "steps": {"a": step, "b": {**step, "status": FAILED, "reason": "x"}},
    }  # fmt: skip
    changes, path, n_read = Changes(0), tmp_path / "study.json", 0
    for i in range(300):
        record = copy.deepcopy(whole)
        changes.change(record)
        text = (
            json.dumps(record).replace(json.dumps(DEEP), "[" * 5000 + "]" * 5000).encode()
        )
        path.write_bytes(changes.noise(text) if i % 5 == 0 else text)
        n_read += read_study_file(path) is not None
        study = read_study(tmp_path)
        assert all(isinstance(line, str) for line in [*failures(study), *remarks(study)])
        assert all(len(paper_numbers(x, [])) == len(x.printed) for x in study.sections)
        Record.read(tmp_path)
    assert 30 < n_read < 270


# ------------------------------------------------------------------------------------ commands


def small(folder: Path, *options: str) -> list[str]:
    return ["study", "demo:vit", "demo:resnet", "--data", "demo:test", "--train", "demo:train",
            "--images", "24", "-o", str(folder), *options]  # fmt: skip


SOME = [
    word
    for name in ("attn-dist", "cka", "knn", "best-layer")
    for word in ("--analyses", name)
]


@pytest.mark.slow
def test_from_models_to_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    done = vitsee(*small(folder, *SOME))
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{folder}/report.html\n"
    assert "2 models over 24 images: about" in done.stderr
    assert f"left out: attn-dist of resnet: {NO_ATTENTION}" in done.stderr
    steps = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(steps) == 12 and steps[0].startswith("[1/12] extract-vit: ")
    assert steps[-1].startswith("[12/12] report: ")
    others = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert len([line for line in others if "images/s" not in line]) == 2, (
        "no command's remarks"
    )
    for name in (
        "attn-dist",
        "cka-vit",
        "cka-resnet",
        "cka-vit-resnet",
        "knn-vit",
        "best-layer",
    ):
        for ending in ("csv", "csv.json", "png"):
            assert (folder / "results" / f"{name}.{ending}").is_file()
    assert "cka-vit-resnet" in (folder / "report.html").read_text()
    command = json.loads((folder / "results" / "cka-vit.csv.json").read_text())["command"]
    record = json.loads((folder / "study.json").read_text())
    assert shlex.join(command) == record["steps"]["cka-vit"]["command"]
    assert record["command"] == ["vitsee", *small(folder, *SOME)]

    (folder / "results" / "knn-vit.csv").unlink()
    again = vitsee(*small(folder, *SOME))
    steps = [line for line in again.stderr.splitlines() if line.startswith("[")]
    redone = [line for line in steps if "done before" not in line]
    assert [line.split()[1] for line in redone] == ["knn-vit:", "report:"]
    assert again.exit_code == 0


@pytest.mark.slow
def test_a_model_that_cannot_be_extracted_is_named_and_left_out(tmp_path: Path) -> None:
    """The others go on; the store of another study is none of this one's."""
    folder = tmp_path / "out"
    (folder / "stores").mkdir(parents=True)
    assert vitsee("extract", "demo:vit", "--data", "demo:train", "--images", "9", "-o",
                  folder / "stores" / "resnet.zarr").exit_code == 0  # fmt: skip
    done = vitsee(*small(folder, "--analyses", "cka", "--analyses", "weights"))
    assert done.exit_code == 1 and done.stdout == f"{folder}/report.html\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("vitsee study: 1 of 7 steps failed: extract-resnet (")
    assert (folder / "results" / "cka-vit.csv").is_file()
    assert not (folder / "results" / "cka-vit-resnet.csv").exists()


@pytest.mark.slow
def test_a_model_whose_classifier_cannot_be_read_has_no_lens(tmp_path: Path) -> None:
    """Its classifier reads a convolution after the last block."""
    module = timm.create_model("test_efficientnet", num_classes=10)
    save_for_hf(module, str(tmp_path / "mine"), safe_serialization=True)
    words = ["study", f"local-dir:{tmp_path / 'mine'}", "--data", "demo:test", "--images", "4",
             "-o", tmp_path / "out", "--analyses", "weights", "--analyses", "lens"]  # fmt: skip
    done = vitsee(*words)
    reason = "the classifier of mine reads mean of 256 channels: none of stem, "
    assert done.exit_code == 0 and f"lens: left out: {reason}" in done.stderr, done.output
    record = json.loads((tmp_path / "out" / "study.json").read_text())
    assert record["left_out"]["lens"].startswith(reason)
    assert (
        f"Not in this study: lens: {reason}"
        in (tmp_path / "out" / "report.html").read_text()
    )


@pytest.mark.slow
def test_a_study_shows_the_heads_of_a_model_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store keeps no attention of single images, so the model is needed again: the study opens
    the folder that it was told, in the store's place and after it has moved; another command asks
    for the user's word."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "before")
    save_for_hf(timm.create_model("test_vit"), "mine", safe_serialization=True)
    words = [
        "study",
        "local-dir:mine?img-size=32&model-arg=patch_size=8&resample-patches=true",
        "--data",
        "demo:test",
    ]
    words += ["--images", "4", "-o", "out", "--analyses", "explore"]
    assert vitsee(*words).exit_code == 0
    page = read_page(Path("out") / "explore.html")
    assert [len(blocks) for blocks in page.blocks] == [6] and page.blocks[0][
        0
    ].patches is not None
    for name in ("mine", "out"):
        Path(name).rename(tmp_path / "after" / name)
    monkeypatch.chdir(tmp_path / "after")
    Path("out/explore.html").unlink()
    again = vitsee(*words)
    assert again.exit_code == 0 and "extract-mine: done before" in again.stderr, (
        again.output
    )
    assert [len(blocks) for blocks in read_page(Path("out") / "explore.html").blocks] == [
        6
    ]
    assert (
        vitsee(
            "explore", "out/stores/mine.zarr", "--recompute", "-o", "alone.html"
        ).exit_code
        == 0
    )
    alone = read_page(Path("alone.html"))
    assert alone.blocks == [[]]
    assert (
        "repeat the command with --trust-store" in alone.about["models"][0]["attention"]
    )


@pytest.mark.slow
def test_a_study_of_less_or_more_in_the_same_folder(tmp_path: Path) -> None:
    """Stores that hold more than is asked for are taken as they are; of those that hold less, what
    to do."""
    words = ["study", "demo:vit", "--data", "demo:test", "-o", str(tmp_path / "out")]
    asked = [*words, "--images", "4", "--analyses"]
    assert vitsee(*asked, "spectrum", "--analyses", "attn-dist").exit_code == 0
    less = vitsee(*asked, "spectrum")
    assert less.exit_code == 0 and "[1/3] extract-vit: done before" in less.stderr, (
        less.output
    )
    more = vitsee(*asked, "normratio", "--analyses", "norms")
    store = tmp_path / "out" / "stores" / "vit.zarr"
    assert more.exit_code == 1 and more.stdout == ""
    assert more.stderr == (
        f"vitsee study: {store} was extracted for fewer analyses and lacks every token, products "
        "of skips and branches; remove it to extract anew, or choose another -o\n"
    )
    grown = vitsee(*words, "--images", "5", "--analyses", "spectrum")
    assert grown.exit_code == 0 and open_store(store).n_images == 5
    other = vitsee(*words, "--images", "3", "--analyses", "spectrum")
    assert other.exit_code == 1 and other.stdout == ""
    assert "n_images is 5, given 3" in other.stderr and "--force" not in other.stderr
    assert f"remove {store} to extract anew" in other.stderr
    (store / "zarr.json").write_text("{}")
    assert (
        vitsee(*asked, "norms")
        .stderr.splitlines()[1]
        .startswith("[1/3] extract-vit: failed: ")
    )
    nothing = vitsee(*asked, "saliency")
    assert nothing.exit_code == 1 and nothing.stdout == ""
    assert nothing.stderr.startswith(
        "vitsee study: nothing to do: saliency: it needs masks"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            KeyboardInterrupt("SIGTERM"),
            75,
            "vitsee study: interrupted; finished steps are kept",
        ),
        (
            KeyboardInterrupt("SIGINT"),
            75,
            "vitsee study: interrupted; finished steps are kept",
        ),
        (
            ValueError("boom"),
            1,
            "attn-dist (ValueError: boom; run it by itself: vitsee attn-dist ",
        ),
    ],
)
def test_a_signal_or_a_bug_in_a_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    """The one ends the study, resumable; the other only the step."""

    @functools.wraps(attn_dist.run)
    def fail(*stores: object, **options: object) -> Table:
        raise error

    failing = dataclasses.replace(attn_dist.ANALYSIS, run=fail)
    monkeypatch.setattr(attn_dist, "ANALYSIS", failing)
    words = ["study", "demo:vit", "--data", "demo:test", "--images", "8", "-o", tmp_path / "out",
             "--analyses", "attn-dist", "--analyses", "weights", "--jobs", 1]  # fmt: skip
    done = vitsee(*words)
    assert done.exit_code == code and said in done.stderr, done.output
    steps = json.loads((tmp_path / "out" / "study.json").read_text())["steps"]
    assert steps["extract-vit"]["status"] == DONE
    page = tmp_path / "out" / "report.html"
    assert ("weights" in steps) == page.exists() == (code == 1)
    if code == 1:  # before all that is less urgent
        first = page.read_text().partition('<h2 id="care">')[2].partition("</summary>")[0]
        assert "Failed: attn-dist: ValueError: boom" in first


@pytest.mark.slow
def test_options_in_a_models_name(tmp_path: Path) -> None:
    """As extract's own: of the weights, and of the input's size."""
    words = [
        "study",
        "demo:vit",
        "a=demo:vit?random-init=3&img-size=40",
        "--data",
        "demo:test",
    ]
    some = ["--images", "4", "--analyses", "attn-dist"]
    done = vitsee(*words, "-o", tmp_path, *some)
    assert done.exit_code == 0, done.output
    trained, random = (
        open_store(tmp_path / "stores" / f"{n}.zarr").manifest for n in ("vit", "a")
    )
    assert (
        random.model["weights"]["source"] == "random"
        and random.model["weights"]["seed"] == 3
    )
    assert trained.model["weights"]["source"] == "local-dir"
    sizes = [m.identity["transform"]["input_size"][1:] for m in (trained, random)]
    assert sizes == [[32, 32], [40, 40]]
    for name, expected in (
        ("demo:vit?random-init", "expected MODEL?OPTION=VALUE"),
        ("demo:vit?seed=3", "no option 'seed' of a model; expected checkpoint, "),
        ("demo:vit?random-init=x", "'x' is not a valid whole number"),
        ("demo:vit?random-init=1&random-init=2", "random-init takes one value"),
    ):
        for command in (
            ("study", name, *words[2:]),
            ("extract", name, "--data", "demo:test"),
        ):
            assert expected in one_line(*command, "-o", tmp_path / "no", code=2)
            assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_the_plan_as_commands(tmp_path: Path) -> None:
    done = vitsee(*small(tmp_path / "out", "--dry-run"))
    assert done.exit_code == 0 and not (tmp_path / "out").exists()
    made, *commands = [shlex.split(line) for line in done.stdout.splitlines()]
    out = str(tmp_path / "out")
    assert made == ["mkdir", "-p", f"{out}/stores", f"{out}/results"], (
        "or no command can write"
    )
    assert (
        commands[0][:3] == ["vitsee", "extract", "demo:vit"]
        and commands[-1][1] == "report"
    )
    for words in commands:
        parses(words)


def parses(words: list[str]) -> None:
    assert words[0] == "vitsee"
    command = main.get_command(click.Context(main), words[1])
    assert command is not None
    command.make_context(words[1], words[2:], parent=click.Context(main))


@pytest.mark.slow
def test_mistakes_are_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for args, code, expected in (
        (["demo:vitt", "--data", "demo:test"], 1, "no demo model 'vitt'"),
        (["demo:vit", "demo:vitt", "--data", "demo:test"], 1, "no demo model 'vitt'"),
        (["demo:vit", "--data", str(tmp_path / "no")], 1, "no file or folder"),
        (
            ["a=demo:vit", "x=demo:vit", "a=demo:resnet", "--data", "demo"],
            1,
            "two models",
        ),
        (["demo:vit", "--data", "demo", "--analyses", "nope"], 1, "no analysis 'nope'"),
        (["demo:vit", "--data", ""], 2, "empty text"),
        (["demo:vit"], 2, "--data"),
        (["demo:vit", "--data", "demo", "--train-images", "3"], 2, "give that too"),
        (["--data", "demo"], 2, "MODEL"),
    ):
        assert expected in one_line("study", *args, "-o", folder, code=code)
        assert not folder.exists()


# ------------------------------------------------------------------------------------ the demo


@pytest.mark.slow
def test_the_demo_has_every_command_once(tmp_path: Path) -> None:
    asked = demo_study(tmp_path)
    models = [survey(label, name) for label, name in asked.models.items()]
    found = with_sets(asked, plan(asked, models, labelled=True))
    commands = {step.command for step in found.steps}
    everything = {*main.list_commands(click.Context(main))}
    assert everything - commands <= {"demo", "study", "report"}, (
        "the study itself, and its end"
    )
    assert all(name.startswith(tuple(needs_of_analyses())) for name in found.left_out)
    assert not {"saliency", "propagate", "keypoints"} & {*found.left_out}
    for step in found.steps:
        if step.make is None:
            parses(shlex.split(step.line))
    assert {step.name for step in tour(asked)} < {step.name for step in found.steps}
    (page,) = (step for step in found.steps if step.command == "explore")
    assert "make demo-real" in page.words[page.words.index("--note") + 1]
    quick = demo_study(tmp_path, quick=True)
    assert len(quick.models) == 2 and quick.images < asked.images
    check_choice(quick)


@pytest.mark.slow
def test_the_demo_ends_with_the_path_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few images and one analysis of the models; the tasks of the miniature sets in full."""
    monkeypatch.setattr(demo_module, "QUICK", ("attn-dist",))
    monkeypatch.setattr(demo_module, "QUICK_IMAGES", 16)
    done = vitsee("demo", "--quick", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path}/out/report.html\n"
    assert (
        "on photographs: make demo-real, or"
        in (tmp_path / "out" / "report.html").read_text()
    )
    results = {path.stem for path in (tmp_path / "out" / "results").glob("*.csv")}
    assert results == {
        "attn-dist", "propagate", "keypoints", "retrieve-buildings", "cluster-objects", "saliency",
        "dense-probe",
    }  # fmt: skip
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(f">{name}.csv<" in page for name in results)
