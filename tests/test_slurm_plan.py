"""`extract --plan slurm`: the script, run with stand-ins for sbatch, srun and scontrol. A real one
runs it in `make slurm`."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.extractions import VIT, extract, extracted, plant_images
from tests.random_stores import PLANS, write
from vitsee_core.extraction.ahead import array_script

# Notes its arguments and the script it was given; ids as clusters give them, 41;here and 42;here.
SBATCH = """#!/bin/bash
n=$(ls "$CALLS" | grep -c batch)
printf '%s\\n' "$@" > "$CALLS/arguments$n"
cat > "$CALLS/batch$n"
echo "$((41 + n));here"
"""
SRUN = '#!/bin/bash\nprintf "%s\\n" "$@" > "$CALLS/srun"\nexit ${CODE:-0}\n'
SCONTROL = '#!/bin/bash\necho "$@" > "$CALLS/scontrol"\n'


class Cluster:
    """Stand-ins in a folder; what they were called with."""

    def __init__(self, folder: Path):
        self.calls, programs = folder / "calls", folder / "programs"
        self.calls.mkdir()
        programs.mkdir()
        bodies = {
            "sbatch": SBATCH,
            "srun": SRUN,
            "scontrol": SCONTROL,
            "vitsee": "#!/bin/sh\n",
        }
        for name, body in bodies.items():
            (programs / name).write_text(body)
            (programs / name).chmod(0o755)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.environ = {"PATH": path, "CALLS": str(self.calls)}

    def bash(
        self, text: str, *args: str, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-s", "--", *args],
            input=text,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )

    def read(self, name: str) -> str:
        path = self.calls / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def directives(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH --")]
    return {key: value for key, _, value in (line[10:].partition("=") for line in lines)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), 12)


def test_the_printed_script_submits_an_array_and_then_its_validation(
    folder: Path, tmp_path: Path, cluster: Cluster
) -> None:
    store = tmp_path / "it's $HOME.zarr"
    words = [
        *VIT,
        "--data",
        str(folder),
        "--slab",
        "4",
        "-o",
        str(store),
        "--workers",
        "3",
    ]
    result = extracted(*words, "--plan", "slurm")
    assert not store.exists()
    done = cluster.bash(result.stdout, "--time=9", "--partition=big")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "submitted: array 41, then validation 42\n"
    assert cluster.read("arguments0").split() == [
        "--parsable",
        "--time=9",
        "--partition=big",
    ]
    expected = ["--parsable", "--dependency=afterok:41", "--kill-on-invalid-dep=yes"]
    assert cluster.read("arguments1").split() == expected
    array = directives(cluster.read("batch0"))
    assert array["array"] == "0-2"  # twelve images in slabs of four
    assert (array["cpus-per-task"], array["gpus"]) == ("5", "1")
    assert (array["signal"], array["requeue"]) == ("TERM@120", "")
    assert "gpus" not in directives(cluster.read("batch1"))
    # What runs is the command that was planned, as it was typed, and nothing of it expands.
    task = {"SLURM_CPUS_PER_TASK": "5", "HOME": "/elsewhere"}
    cluster.bash(cluster.read("batch0"), **task)
    ran = ["--cpus-per-task=5", "vitsee", "extract", *words, "--shard", "slurm"]
    assert cluster.read("srun").splitlines() == ran
    cluster.bash(cluster.read("batch1"), **task)
    assert cluster.read("srun").splitlines()[1:] == [
        "vitsee",
        "validate",
        "--deep",
        str(store),
    ]


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(75, "", "requeue 7_3"), (75, "50", ""), (0, "", ""), (1, "", "")],
)
def test_only_the_task_that_was_stopped_is_requeued(
    code: int, restarts: str, requeued: str, cluster: Cluster
) -> None:
    plan = array_script(("vitsee", "extract", "m", "-o", "s"), "s", "/", n_slabs=20)
    assert cluster.bash(plan).returncode == 0
    environ = {"SLURM_CPUS_PER_TASK": "8", "CODE": str(code), "SLURM_JOB_ID": "10"}
    environ |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    environ |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    assert cluster.bash(cluster.read("batch0"), **environ).returncode == code
    assert cluster.read("scontrol").strip() == requeued


def test_the_resources_follow_the_options() -> None:
    def of(**given: int | bool | None) -> dict[str, str]:
        plan = array_script(
            ("vitsee", "extract"),
            "s3://b/runs/b16.zarr/",
            "/x y",
            500,
            **given,  # type: ignore[arg-type]
        )  # type: ignore[arg-type]
        return directives(plan.split("ARRAY'\n")[1].split("ARRAY\n")[0])

    assert of()["array"] == "0-7"
    assert (of()["cpus-per-task"], of()["gpus"]) == ("10", "1")
    assert (of(gpu=False)["cpus-per-task"], "gpus" in of(gpu=False)) == ("8", False)
    assert of(gpu=False, workers=12)["cpus-per-task"] == "14"
    assert of()["job-name"] == "vitsee-b16"
    assert "\ncd '/x y'\n" in array_script(("v",), "s", "/x y", 1)


def test_without_vitsee_on_the_path_nothing_is_submitted(cluster: Cluster) -> None:
    plan = array_script(("vitsee", "extract"), "s", "/", n_slabs=1)
    (Path(cluster.environ["PATH"].split(os.pathsep)[0]) / "vitsee").unlink()
    programs, *_ = cluster.environ["PATH"].split(os.pathsep)
    bare = f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin"
    done = cluster.bash(plan, PATH=bare)
    assert done.returncode == 1
    assert "no vitsee on PATH" in done.stderr
    assert not list(cluster.calls.iterdir())


def test_options_stay_before_a_double_dash() -> None:
    plan = array_script(("vitsee", "extract", "-o", "s", "--", "-m"), "s", "/", 1)
    assert "vitsee extract -o s --shard slurm -- -m ||" in plan


@pytest.mark.parametrize(
    ("more", "code", "phrase"),
    [
        (["--shard", "0/2"], 2, "leave out --shard"),
        (["--dry-run"], 2, "leave out --shard and --dry-run"),
        (["--force"], 1, "delete the store first"),
        (["--only", "none"], 1, "none"),
        (["-o", "a\nb.zarr"], 2, "cannot stand in a script"),
    ],
)
def test_what_cannot_be_planned(
    more: list[str], code: int, phrase: str, folder: Path, tmp_path: Path
) -> None:
    output = [] if "-o" in more else ["-o", tmp_path / "s.zarr"]
    words = [*VIT, "--data", folder, *output, *more, "--plan=slurm"]
    result = extract(*words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert phrase in result.stderr


def test_mistakes_are_found_before_the_queue(folder: Path, tmp_path: Path) -> None:
    out = ["-o", tmp_path / "s.zarr", "--plan", "slurm"]
    for words, phrase in (
        (["vit_bse_patch16_224", "--data", folder, *out], "no timm model is called"),
        ([*VIT, "--data", tmp_path / "gone", *out], "gone"),
    ):
        result = extract(*words)
        assert (result.exit_code, result.stdout) == (1, "")
        assert phrase in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_store_that_is_there_counts_its_own_slabs(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.zarr"
    words = [*VIT, "--data", folder, "-o", store]
    begun = [
        *words,
        "--slab",
        "3",
        "--shard",
        "0/2",
        "--sites",
        "embed",
        "--tokens",
        "pooled",
    ]
    extracted(*begun)
    script = extracted(*words, "--plan", "slurm").stdout
    assert "#SBATCH --array=0-3\n" in script  # not one slab of the default 256
    extracted(*words)
    result = extract(*words, "--plan", "slurm")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is complete: there is nothing to plan" in result.stderr
    script = extracted(*words, "--plan", "slurm", "--sites", "norms").stdout
    assert "#SBATCH --array=0-3\n" in script, "more sites, of all of its slabs"


def test_a_store_of_another_kind_is_no_plan(tmp_path: Path, folder: Path) -> None:
    write(tmp_path / "s.zarr", PLANS["vit"])
    result = extract(*VIT, "--data", folder, "-o", tmp_path / "s.zarr", "--plan", "slurm")
    assert result.exit_code == 1
    assert shlex.quote("s.zarr") in result.stderr
