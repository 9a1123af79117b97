"""`vitsee study` and `vitsee demo`: what they plan, do again, and go on without."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from vitsee_cli.main import main
from vitsee_core.analyses import attn_dist
from vitsee_core.catalogue import needs_of_analyses
from vitsee_core.study import demo as demo_module
from vitsee_core.study.cost import EFFICIENCY, Cost, cost
from vitsee_core.study.demo import demo_study, tour, with_sets
from vitsee_core.study.planning import BEST, check_choice, plan, reasons
from vitsee_core.study.running import (
    DONE,
    FAILED,
    LEFT_OUT,
    Outcome,
    Record,
    Stopped,
    begin,
    carry_out,
    make_folders,
)
from vitsee_core.study.steps import Plan, Step, Study, check_labels, label_of
from vitsee_core.study.surveyed import SurveyedModel, survey
from vitsee_stores.errors import VitseeError

NO_ATTENTION = "no block has a softmax over tokens"


def vitsee(*args: object) -> Result:
    return CliRunner().invoke(main, [*map(str, args)])


def model(label: str, **changes: Any) -> SurveyedModel:
    """A transformer."""
    offered = ("sites", "grid", "attention", "heads", "residual", "classifier")
    about: dict[str, Any] = {
        "label": label, "name": f"demo:{label}", "lacks": dict.fromkeys(offered),
        "class_token": True, "grid": (4, 6), "heads": "blocks.0.attn.heads", "flops": 10**6,
        "size": (3, 8, 12), "n_blocks": 2, "bytes_of_tokens": 1000, "bytes_pooled": 10,
    }  # fmt: skip
    return SurveyedModel(**{**about, **changes})


def cnn(label: str) -> SurveyedModel:
    lacks = {**model(label).lacks, "attention": NO_ATTENTION, "heads": NO_ATTENTION}
    return model(label, lacks=lacks, class_token=False, grid=(1, 1), heads=None)


def study(folder: Path = Path("out"), *labels: str, **changes: Any) -> Study:
    models = {label: f"demo:{label}" for label in labels or ("vit", "cnn")}
    return Study(folder, models, "photos", **{"train": "others", **changes})


def lines(steps: Sequence[Step]) -> list[str]:
    return [step.line for step in steps]


def named(found: Plan, name: str) -> Step:
    return next(step for step in found.steps if step.name == name)


# ------------------------------------------------------------------------------------ plans


def test_every_analysis_is_a_step_or_has_a_reason() -> None:
    found = plan(study(), [model("vit"), cnn("cnn")], labelled=True)
    known = {*needs_of_analyses(), BEST}
    assert {step.command for step in found.analyses} | {*found.left_out} >= known
    assert {"saliency", "propagate", "keypoints"} < {*found.left_out}
    assert found.left_out["attn-dist of cnn"] == NO_ATTENTION
    assert "head-types: " not in "\n".join(reasons(found.left_out))
    names = [step.name for step in found.steps]
    assert len({*names}) == len(names)
    outputs = [path for step in found.steps for path in step.outputs]
    assert len({*outputs}) == len(outputs), "no step writes over another's result"


def test_extraction_keeps_what_the_analyses_need() -> None:
    found = plan(study(), [model("vit"), cnn("cnn")], labelled=True)
    assert lines(found.extractions) == [
        "vitsee extract demo:vit --data photos --images 2000 -o out/stores/vit.zarr "
        "--sites blocks --sites head --sites blocks.0.attn.heads --inputs --erf 64",
        "vitsee extract demo:vit --data others --images 2000 -o out/stores/vit-train.zarr "
        "--tokens pooled --attention none --no-residual",
        "vitsee extract demo:cnn --data photos --images 2000 -o out/stores/cnn.zarr "
        "--inputs --erf 64",
        "vitsee extract demo:cnn --data others --images 2000 -o out/stores/cnn-train.zarr "
        "--tokens pooled --attention none --no-residual",
    ]
    found = plan(study(analyses=("knn",), images=9, seed=3), [model("vit")], labelled=True)
    assert lines(found.extractions)[0] == (
        "vitsee extract demo:vit --data photos --images 9 -o out/stores/vit.zarr --seed 3 "
        "--tokens pooled --attention none --no-residual"
    )
    found = plan(study(analyses=("normratio",), device="cuda"), [model("vit")], labelled=True)
    assert lines(found.extractions) == [
        "vitsee extract demo:vit --data photos --images 2000 -o out/stores/vit.zarr "
        "--device cuda --tokens pooled --attention none"
    ]


def test_steps_on_two_kinds_of_models() -> None:
    found = plan(study(), [model("vit"), cnn("cnn")], labelled=True)
    heads = named(found, "cka-heads-vit-cnn")
    assert heads.words[1:3] == ("out/stores/vit.zarr", "out/stores/cnn.zarr")
    assert [s.name for s in found.analyses if s.command == "cka"] == [
        "cka-vit",
        "cka-cnn",
        "cka-vit-cnn",
    ]
    assert named(found, "knn-cnn").words[1:3] == (
        "out/stores/cnn-train.zarr",
        "out/stores/cnn.zarr",
    )
    best = named(found, BEST)
    assert {path.name for path in best.inputs} == {
        "knn-vit.csv", "knn-cnn.csv", "probe-vit.csv", "probe-cnn.csv", "cluster.csv",
        "retrieve.csv",
    }  # fmt: skip
    assert found.analyses.index(best) == len(found.analyses) - 1
    assert "localize-tokens-vit" in [s.name for s in found.analyses]
    assert named(found, "localize-tokens-vit").words[6:8] == ("--tokens", "2,3")
    alone = plan(study(Path("out"), "vit"), [model("vit")], labelled=True)
    assert alone.left_out["cka-heads"].startswith("it compares models of two kinds")
    five = [model(f"m{i}") for i in range(5)]
    pairs = [
        s.name for s in plan(study(), five, labelled=True).analyses if s.command == "similarity"
    ]
    assert pairs == [f"similarity-m0-m{i}" for i in range(1, 5)]
    assert "cka-last-layers" in [s.name for s in plan(study(), five, labelled=True).analyses]


def test_images_without_labels_or_without_others_to_train_on() -> None:
    found = plan(study(), [model("vit")], labelled=False)
    for command in ("knn", "probe", "cluster", "retrieve", "lens"):
        assert found.left_out[command] == "the images of photos have no labels"
    assert found.left_out[BEST].startswith("none of its inputs is made")
    assert [step.name for step in found.extractions] == ["extract-vit"]
    found = plan(study(train=None), [model("vit")], labelled=True)
    assert "name them with --train" in found.left_out["knn"]
    assert named(found, "probe-vit").words[2:4] == ("--holdout", "0.3")


def test_a_model_without_a_classifier_or_any_grid() -> None:
    lacks = {**model("x").lacks, "classifier": "it has no classifier", "grid": "no grid"}
    found = plan(study(), [model("x", lacks=lacks, grid=None, class_token=False)], labelled=True)
    assert found.left_out["lens"] == "it has no classifier"
    assert found.left_out["erf"] == found.left_out["spatial"] == "no grid"
    assert "--erf" not in found.extractions[0].words


def test_choosing_analyses() -> None:
    found = plan(study(analyses=("cka", "erf"), skip=("erf",)), [model("vit")], labelled=True)
    assert {step.command for step in found.analyses} == {"cka"} and found.left_out == {}
    with pytest.raises(VitseeError, match="no analysis 'ckaa'; analyses of a study: attn-dist"):
        check_choice(study(analyses=("ckaa",)))
    with pytest.raises(VitseeError, match="--skip leaves no analysis"):
        check_choice(study(analyses=("cka",), skip=("cka",)))


def test_what_it_takes() -> None:
    models = [model("vit")]
    found = plan(study(images=100), models, labelled=True)
    needed = cost(study(images=100), found, models, speed=1e6)
    grams = 2 * (2 + 1) * 4 * 100**2  # of cka and similarity, of two blocks and the embedding
    assert needed.size_bytes == 100 * (1000 + 3 * 8 * 12) + 100 * 10 + grams
    # forward passes of both stores, and the backward ones of 64 images for each of two blocks
    assert needed.seconds == pytest.approx((100 + 64 * 2 + 100) / EFFICIENCY)
    assert "2 models over 5 images: about 1.0 kB on disk" in Cost(1000, 5).describe(2, 5)
    assert "about 3 minutes" in Cost(1, 170).describe(1, 1)
    assert "about 2.0 hours" in Cost(1, 7200).describe(1, 1)


def test_what_shapes_say_of_a_model() -> None:
    vit, resnet = survey("vit", "demo:vit"), survey("resnet", "demo:resnet")
    assert vit.class_token and vit.heads == "blocks.0.attn.heads" and vit.grid == (8, 8)
    assert set(vit.lacks.values()) == {None} and vit.size == (3, 32, 32) and vit.n_blocks == 6
    assert not resnet.class_token and resnet.heads is None
    assert resnet.lacks["attention"] is not None and resnet.lacks["residual"] is None
    # 65 tokens, 6 blocks of width 96 with 192 hidden: 4 D^2 + 2 D H weights, two products with A
    weights = 2 * 65 * 6 * (4 * 96**2 + 2 * 96 * 192)
    products = 2 * 6 * 2 * 65 * 65 * 96
    patches_and_head = 2 * 64 * 96 * 3 * 16 + 2 * 96 * 10
    assert vit.flops == weights + products + patches_and_head


@pytest.mark.parametrize(
    ("name", "label"),
    [("vit_base_patch16_224.augreg_in21k", "vit_base_patch16_224"), ("demo:vit-gap", "vit-gap"),
     ("hf-hub:timm/resnet50.a1", "resnet50"), ("local-dir:runs/my.model/", "my.model"),
     ("local-dir:a b", "a_b"), (":", "model")],
)  # fmt: skip
def test_labels(name: str, label: str) -> None:
    assert label_of(name) == label


def test_labels_that_are_refused() -> None:
    assert check_labels([("a", "x"), ("b", "x")]) == {"a": "x", "b": "x"}
    for pairs, expected in (
        ([("a", "x"), ("a", "y")], "two models are called 'a': x and y"),
        ([("../a", "x")], "'../a' cannot name a store"),
        ([("a-train", "x")], "no -train at its end"),
        ([("", "x")], "'' cannot name a store"),
    ):
        with pytest.raises(VitseeError, match=expected.replace("?", r"\?")):
            check_labels(pairs)


def test_few_images() -> None:
    """Of what is there: cost, neighbours, and what has no value of so few."""
    few = study(images=100, there={"photos": 12, "others": 9})
    models = [model("vit"), cnn("cnn")]
    found = plan(few, models, labelled=True)
    assert "--images 100" in found.extractions[0].line and "--erf 12" in found.extractions[0].line
    assert "--k 5" in named(found, "similarity-vit-cnn").line
    assert "--k 4" in named(found, "knn-vit").line
    grams = 2 * 2 * (2 + 1) * 4 * 12**2
    needed = cost(few, found, models, speed=1e6)
    assert needed.size_bytes == 2 * (12 * (1000 + 3 * 8 * 12) + 9 * 10) + grams
    assert (few.n_images(), few.n_images("train")) == (12, 9)
    more = study(images=100, train_images=300, there={"photos": 12, "others": 200})
    of = plan(more, models, labelled=True)
    assert [step.words[5] for step in of.extractions] == ["100", "300"] * 2
    assert (more.n_images(), more.n_images("train")) == (12, 200)
    many = plan(study(there={"photos": 21, "others": 20}), models, labelled=True)
    assert "--k" not in named(many, "knn-vit").words + named(many, "similarity-vit-cnn").words
    three = plan(study(there={"photos": 3}), models, labelled=True)
    for command in ("cka", "cka-heads", "similarity", "localize"):
        assert three.left_out[command] == "3 images of photos; expected at least 4"


def test_results_of_one_name_are_refused() -> None:
    """`cka` of a-b, and of a against b."""
    with pytest.raises(VitseeError, match="two results of this study would be called cka-a-b; "):
        plan(study(Path("out"), "a", "b", "a-b"), [model("a"), model("b"), model("a-b")],
             labelled=True)  # fmt: skip


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
    assert again() == ["a"], "its own output was changed; what it makes again is as it was"
    (tmp_path / "c.csv").unlink()
    assert again() == ["c"]
    other = [Step("a", ("a", "--new"), (), chain[0].outputs), *chain[1:]]
    assert again(other) == ["a", "b"], "b's input is another now; c's is not"
    (tmp_path / "study.json").write_text("{")
    assert again(other) == ["a", "b", "c", "d"], "without a record nothing is known to be done"


def test_a_step_that_fails_does_not_stop_the_others(tmp_path: Path, chain: list[Step]) -> None:
    perform, said = Commands(), list[str]()
    perform.fails["a"] = (1, "no such thing")
    failed = carry_out(chain, Record(tmp_path / "study.json"), perform, said.append)
    assert [step.name for step in failed] == ["a", "b", "c"] and perform.done == ["a", "d"]
    assert said[:2] == ["[1/4] a: failed: no such thing", "[2/4] b: left out: a.csv was not made"]
    record = json.loads((tmp_path / "study.json").read_text())["steps"]
    assert [record[name]["status"] for name in "abcd"] == [FAILED, LEFT_OUT, LEFT_OUT, DONE]
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
    assert [*json.loads((tmp_path / "study.json").read_text())["steps"]] == ["a"]


def test_the_record_says_what_was_asked_for(tmp_path: Path) -> None:
    asked = study(tmp_path / "out", images=5)
    make_folders(asked)
    begin(asked, ["vitsee", "study"], {"knn": "no labels"})
    found = json.loads((tmp_path / "out" / "study.json").read_text())
    assert found["images"] == 5 and found["models"] == {"vit": "demo:vit", "cnn": "demo:cnn"}
    assert found["left_out"] == {"knn": "no labels"} and "vitsee" in found["versions"]
    (tmp_path / "file").write_text("")
    with pytest.raises(VitseeError, match="cannot make the folder"):
        make_folders(study(tmp_path / "file"))
    for text in ("{", "[]", '{"trials": 3}'):
        (asked.folder / "study.json").write_text(text)
        with pytest.raises(VitseeError, match="is no record of a study; choose another"):
            make_folders(asked)


# ------------------------------------------------------------------------------------ commands


def small(folder: Path, *options: str) -> list[str]:
    return ["study", "demo:vit", "demo:resnet", "--data", "demo:test", "--train", "demo:train",
            "--images", "24", "-o", str(folder), *options]  # fmt: skip


SOME = [word for name in ("attn-dist", "cka", "knn", "best-layer") for word in ("--analyses", name)]


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
    assert len([line for line in others if "images/s" not in line]) == 2, "no command's remarks"
    for name in ("attn-dist", "cka-vit", "cka-resnet", "cka-vit-resnet", "knn-vit", "best-layer"):
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


def test_a_study_of_less_or_more_in_the_same_folder(tmp_path: Path) -> None:
    """Stores that hold more than is asked for are taken as they are; of those that hold less, what
    to do."""
    words = ["study", "demo:vit", "--data", "demo:test", "-o", str(tmp_path / "out")]
    asked = [*words, "--images", "4", "--analyses"]
    assert vitsee(*asked, "spectrum", "--analyses", "attn-dist").exit_code == 0
    less = vitsee(*asked, "spectrum")
    assert less.exit_code == 0 and "[1/3] extract-vit: done before" in less.stderr, less.output
    more = vitsee(*asked, "normratio", "--analyses", "norms")
    store = tmp_path / "out" / "stores" / "vit.zarr"
    assert more.exit_code == 1 and more.stdout == ""
    assert more.stderr == (
        f"vitsee study: {store} was extracted for fewer analyses and lacks every token, products "
        "of skips and branches; remove it to extract anew, or choose another -o\n"
    )
    other = vitsee(*words, "--images", "5", "--analyses", "spectrum")
    assert other.exit_code == 1 and other.stdout == ""
    assert "n_images is 4, given 5" in other.stderr and "--force" not in other.stderr
    assert f"choose another -o, drop the option, or remove {store} to extract anew" in other.stderr
    (store / "zarr.json").write_text("{}")
    assert vitsee(*asked, "norms").stderr.splitlines()[1].startswith("[1/3] extract-vit: failed: ")
    nothing = vitsee(*asked, "saliency")
    assert nothing.exit_code == 1 and nothing.stdout == ""
    assert nothing.stderr.startswith("vitsee study: nothing to do: saliency: it needs masks")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt("SIGTERM"), 75, "vitsee study: interrupted; finished steps are kept"),
        (ValueError("boom"), 1, "attn-dist (ValueError: boom; run it by itself: vitsee attn-dist "),
    ],
)
def test_a_signal_or_a_bug_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    """The one ends the study, resumable; the other only the step."""

    def fail(*stores: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(attn_dist, "run", fail)
    words = ["study", "demo:vit", "--data", "demo:test", "--images", "8", "-o", tmp_path / "out",
             "--analyses", "attn-dist", "--analyses", "weights"]  # fmt: skip
    done = vitsee(*words)
    assert done.exit_code == code and said in done.stderr, done.output
    steps = json.loads((tmp_path / "out" / "study.json").read_text())["steps"]
    assert steps["extract-vit"]["status"] == DONE
    assert ("weights" in steps) == (tmp_path / "out" / "report.html").exists() == (code == 1)


def test_the_plan_as_commands(tmp_path: Path) -> None:
    done = vitsee(*small(tmp_path / "out", "--dry-run"))
    assert done.exit_code == 0 and not (tmp_path / "out").exists()
    made, *commands = [shlex.split(line) for line in done.stdout.splitlines()]
    out = str(tmp_path / "out")
    assert made == ["mkdir", "-p", f"{out}/stores", f"{out}/results"], "or no command can write"
    assert commands[0][:3] == ["vitsee", "extract", "demo:vit"] and commands[-1][1] == "report"
    for words in commands:
        parses(words)


def parses(words: list[str]) -> None:
    assert words[0] == "vitsee"
    command = main.get_command(click.Context(main), words[1])
    assert command is not None
    command.make_context(words[1], words[2:], parent=click.Context(main))


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for args, code, expected in (
        (["demo:vitt", "--data", "demo:test"], 1, "no demo model 'vitt'"),
        (["demo:vit", "--data", str(tmp_path / "no")], 1, "no file or folder"),
        (
            ["demo:vit", "a=demo:vit", "x=demo:vit", "a=demo:resnet", "--data", "demo"],
            1,
            "two models",
        ),
        (["demo:vit", "--data", "demo", "--analyses", "nope"], 1, "no analysis 'nope'"),
        (["demo:vit", "--data", ""], 2, "empty text"),
        (["demo:vit"], 2, "--data"),
        (["demo:vit", "--data", "demo", "--train-images", "3"], 2, "give that too"),
        (["--data", "demo"], 2, "MODEL"),
    ):
        done = vitsee("study", *args, "-o", folder)
        assert done.exit_code == code and expected in done.stderr, done.output
        assert code == 2 or done.stderr.count("\n") == 1
        assert done.stdout == "" and not folder.exists()


# ------------------------------------------------------------------------------------ the demo


def test_the_demo_has_every_command_once(tmp_path: Path) -> None:
    asked = demo_study(tmp_path)
    models = [survey(label, name) for label, name in asked.models.items()]
    found = with_sets(asked, plan(asked, models, labelled=True))
    commands = {step.command for step in found.steps}
    everything = {*main.list_commands(click.Context(main))}
    assert everything - commands <= {"demo", "study", "report"}, "the study itself, and its end"
    assert all(name.startswith(tuple(needs_of_analyses())) for name in found.left_out)
    assert not {"saliency", "propagate", "keypoints"} & {*found.left_out}
    for step in found.steps:
        if step.make is None:
            parses(shlex.split(step.line))
    assert {step.name for step in tour(asked)} < {step.name for step in found.steps}
    quick = demo_study(tmp_path, quick=True)
    assert len(quick.models) == 2 and quick.images < asked.images
    check_choice(quick)


def test_the_demo_ends_with_the_path_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few images and one analysis of the models; the tasks of the miniature sets in full."""
    monkeypatch.setattr(demo_module, "QUICK", ("attn-dist",))
    monkeypatch.setattr(demo_module, "QUICK_IMAGES", 16)
    done = vitsee("demo", "--quick", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path}/out/report.html\n"
    results = {path.stem for path in (tmp_path / "out" / "results").glob("*.csv")}
    assert results == {
        "attn-dist", "propagate", "keypoints", "retrieve-buildings", "cluster-objects", "saliency"
    }  # fmt: skip
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(f">{name}.csv<" in page for name in results)
