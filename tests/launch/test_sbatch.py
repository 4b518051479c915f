"""`drumline launch slurm`: a script that says what it does, and a job that comes back until its run is finished."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App, CycloptsError
from helpers.ranks import train_ranks
from helpers.slurm import two_nodes, wait_until
from helpers.small import small
from helpers.warm import warm_programs
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.cli.app import parser
from drumline.cli.launch import add_jobs
from drumline.errors import ConfigError, DrumlineError
from drumline.files.run_folder import RunFolder
from drumline.launch.slurm import SlurmConfig, SlurmJob, seconds_of
from drumline.report.records import read_metrics

TRAIN = ("train", "--train_data_path", "text", "--run_dir", "runs/big")
TWO_BY_EIGHT = ("--nodes", "2", "--gpus_per_node", "8")


def launch(*words: str) -> Any:
    """`drumline launch slurm` with these words."""
    app = App(name="launch", default_parameter=parser().default_parameter, result_action="return_value")
    add_jobs(app, check=lambda given: parser().parse_args(list(given), exit_on_error=False, print_error=False))
    return app(["slurm", *words], exit_on_error=False, print_error=False)


def job(*words: str, more: tuple[str, ...] = (), **asked: Any) -> SlurmJob:
    config = SlurmConfig(**{"nodes": 2, "gpus_per_node": 8, **asked})
    return SlurmJob(words or TRAIN, config, script=Path("/shared/runs/big.sbatch"), more=more)


def options(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)


def test_a_dry_run_prints_the_script_and_the_line_that_submits_it_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch(*TWO_BY_EIGHT, "--dry_run", "--", *TRAIN) == 0
    *script, submit = capsys.readouterr().out.splitlines()
    assert submit == f"sbatch --parsable {tmp_path}/runs/big.sbatch"
    assert script[-1] == "exit $code"  # so that the whole output, saved to a file, is a script too
    assert "\n".join(script) + "\n" == SlurmJob(TRAIN, SlurmConfig(nodes=2, gpus_per_node=8)).text()
    assert list(tmp_path.iterdir()) == []


def test_the_job_asks_for_its_nodes_and_is_warned_and_queued_again() -> None:
    asked = options(
        job(time="24:00:00", partition="gpu", account="lab", cpus_per_task=64, warn_s=300, more=("--qos=high",)).text()
    )
    wanted = "nodes=2 ntasks-per-node=1 gpus-per-node=8 time=24:00:00 signal=USR1@300 requeue open-mode=append qos=high"
    for option in [*wanted.split(), "partition=gpu", "account=lab", "cpus-per-task=64", "job-name=big"]:
        assert f"--{option}" in asked
    assert "--output=/shared/runs/big-%j.out" in asked


def test_one_task_per_node_starts_the_ranks_of_its_host() -> None:
    words = job(cpus_per_task=64).argv()
    assert words[: words.index(sys.executable)] == [
        *("srun", "--wait=600", "--cpu-bind=none", "--cpus-per-task=64"),
        *("env", "--unset=SLURM_PROCID", "--unset=SLURM_STEP_NUM_TASKS"),
    ]
    arguments = ["-m", "drumline", "train", "--nproc", "8", "--nnodes", "2", *TRAIN[1:]]
    assert words[words.index(sys.executable) + 1 :] == arguments
    assert "--nnodes" not in job(nodes=1).argv()


def test_hosts_to_be_checked_find_each_other_by_the_variables_of_srun(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(*TWO_BY_EIGHT, "--dry_run", "--", "doctor", "--quick") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("srun ")]
    assert shlex.split(line)[3:] == [sys.executable, "-m", "drumline", "doctor", "--quick"]


def test_the_secret_of_the_run_is_made_when_the_job_runs_and_given_to_all_its_hosts() -> None:
    (line,) = [line for line in job().text().splitlines() if "DRUMLINE_SECRET" in line]
    show = f"{line}; sh -c 'echo $DRUMLINE_SECRET'"
    own = {name: value for name, value in os.environ.items() if name != "DRUMLINE_SECRET"}
    made = [subprocess.check_output(["bash", "-uc", show], env=own, text=True).strip() for _ in range(2)]
    assert made[0] != made[1] and all(re.fullmatch("[0-9a-f]{64}", secret) for secret in made)
    mine = {**own, "DRUMLINE_SECRET": "mine"}
    assert subprocess.check_output(["bash", "-uc", show], env=mine, text=True).strip() == "mine"
    assert "DRUMLINE_SECRET" not in job(nodes=1).text()


def test_hosts_without_gpus_get_one_rank_or_as_many_as_were_asked_for() -> None:
    assert "--gpus-per-node" not in job(gpus_per_node=0).text()
    assert "--nproc 1 --nnodes 2" in job(gpus_per_node=0).text()
    four = job(*TRAIN, "--nproc", "4", gpus_per_node=0)
    assert four.argv().count("--nproc") == 1
    for made, ranks in ((four, 4), (job(gpus_per_node=0), 1), (job(), 8)):
        assert f":-$((SLURM_CPUS_ON_NODE / {ranks} > 0 ? " in made.text()


def test_a_bench_of_several_hosts_has_its_ranks_from_srun_and_is_not_started_again() -> None:
    several = job("bench", "--preset", "modern-tiny")
    assert "--ntasks-per-node=8" in options(several.text()) and "env" not in several.argv()
    assert "--nproc" in job("bench", nodes=1).argv()
    assert "--no-requeue" in options(several.text()) and "scontrol" not in several.text()


AWKWARD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@settings(deadline=None, max_examples=200)
@given(st.lists(AWKWARD.filter(lambda word: not word.startswith("--")), max_size=4))
def test_the_shell_gives_srun_the_very_words_whatever_is_in_them(values: list[str]) -> None:
    words = [word for value in values for word in ("--sample_prompt", value)]
    script = job(*TRAIN, *words).text()
    line = script[script.index("\nsrun ") + 1 : script.index("\ncode=$?\n")]
    assert shlex.split(line) == job(*TRAIN, *words).argv()
    assert shlex.split(line)[-len(words) or len(line) :] == words


@pytest.fixture
def batch(tmp_path: Path) -> Callable[..., tuple[int, str, list[str]]]:
    """Runs a job's script with programs in place of SLURM's: exit code, output, and whatever scontrol was asked."""
    (tmp_path / "bin").mkdir()
    programs = {
        "srun": '#!/bin/bash\nprintf "%s\\0" srun "$@" > "$PLACE/words"\nexit $SRUN_CODE\n',
        "scontrol": '#!/bin/bash\necho "$@" >> "$PLACE/scontrol"\n',
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(what: SlurmJob, *, code: int, restarts: int | None = None) -> tuple[int, str, list[str]]:
        environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PLACE": str(tmp_path), "SRUN_CODE": str(code)}
        environ |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4"}
        environ |= {} if restarts is None else {"SLURM_RESTART_COUNT": str(restarts)}
        done = subprocess.run(["bash"], input=what.text(), env=environ, capture_output=True, text=True, check=False)
        asked = tmp_path / "scontrol"
        lines = asked.read_text().splitlines() if asked.exists() else []
        asked.unlink(missing_ok=True)
        return done.returncode, done.stdout + done.stderr, lines

    return run


@pytest.mark.parametrize("code", [75, 130, 138, 143])
def test_a_run_that_a_signal_stopped_is_queued_again(batch: Callable[..., Any], code: int) -> None:
    ended, said, asked = batch(job(), code=code)
    assert ended == code and asked == ["requeue 7"] and "requeued" in said


@pytest.mark.parametrize("code", [0, 1, 2, 3, 70, 137])
def test_a_run_that_ended_by_itself_is_not_queued_again_and_its_exit_code_is_the_jobs(
    batch: Callable[..., Any], code: int
) -> None:
    ended, said, asked = batch(job(), code=code)
    assert ended == code and asked == []
    assert ("runs/big/status.json" in said) == (code == 3)


def test_a_job_is_not_queued_again_for_ever(batch: Callable[..., Any]) -> None:
    assert batch(job(max_requeues=2), code=75, restarts=1)[2] == ["requeue 7"]
    ended, said, asked = batch(job(max_requeues=2), code=75, restarts=2)
    assert ended == 75 and asked == [] and "after 2 restarts; to resume: sbatch /shared/runs/big.sbatch" in said


def test_bash_hands_over_quotes_and_newlines_as_they_are(batch: Callable[..., Any], tmp_path: Path) -> None:
    awkward = job(*TRAIN, "--sample_prompt", 'it\'s "5$"\n$(rm -rf /) `x` \\ ;&|', gpus_per_node=3)
    assert batch(awkward, code=0)[:2] == (0, "")
    assert (tmp_path / "words").read_text().split("\0")[:-1] == awkward.argv()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--nodes", "0", "--gpus_per_node", "8", "--", *TRAIN], "--nodes 0"),
        ([*TWO_BY_EIGHT, "--", "train"], "needs --run_dir"),
        ([*TWO_BY_EIGHT], "no command to run"),
        ([*TWO_BY_EIGHT, "--", "sample", "runs/big"], "'sample' cannot be run as a job"),
        ([*TWO_BY_EIGHT, "--", *TRAIN, "--nproc", "8"], "--nproc is set by the launcher"),
        ([*TWO_BY_EIGHT, "--", *TRAIN, "--rdzv-endpoint=a:1"], "--rdzv_endpoint is set by the launcher"),
        ([*TWO_BY_EIGHT, "--time", "a day", "--", *TRAIN], "--time 'a day'"),
        ([*TWO_BY_EIGHT, "--time", "2", "--", *TRAIN], "--time 2 is 120 s"),
        ([*TWO_BY_EIGHT, "--warn_s", "70000", "--", *TRAIN], "--warn_s 70000"),
        ([*TWO_BY_EIGHT, "--cpus_per_task", "0", "--", *TRAIN], "--cpus_per_task 0"),
        ([*TWO_BY_EIGHT, "--max_requeues=-1", "--", *TRAIN], "--max_requeues -1"),
        ([*TWO_BY_EIGHT, "--job_name", "a/b", "--", *TRAIN], "--job_name 'a/b'"),
        ([*TWO_BY_EIGHT, "--partition", "a\nb", "--dry_run", "--", *TRAIN], "--partition 'a\\nb'"),
        ([*TWO_BY_EIGHT, "--sbatch", "h100", "--", *TRAIN], "--sbatch 'h100'"),
        ([*TWO_BY_EIGHT, "--", *TRAIN, "--sample_prompt", "\udc80"], "not valid UTF-8"),
        ([*TWO_BY_EIGHT, "--", *TRAIN, "--lr", "-1"], "lr is -1"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    words: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DrumlineError) as raised:
        launch(*words)
    assert problem in raised.value.problem and raised.value.fix
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_flag_of_the_launcher_or_of_the_command_gets_the_error_that_drumline_itself_gives() -> None:
    with pytest.raises(CycloptsError, match=r"--partion.*--partition"):
        launch(*TWO_BY_EIGHT, "--partion", "gpu", "--dry_run", "--", *TRAIN)
    with pytest.raises(CycloptsError, match="--total_step"):
        launch(*TWO_BY_EIGHT, "--dry_run", "--", *TRAIN, "--total_step", "5")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-0", 172800), ("1-12:30", 131400), ("1-0:0:9", 86409)],
)
def test_time_limits_are_read_as_slurm_reads_them(time: str, seconds: float) -> None:
    assert seconds_of(time) == seconds
    assert seconds_of(None) == seconds_of("unlimited") == float("inf")


def test_without_sbatch_the_script_is_written_and_the_fix_says_where_to_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not installed") as raised:
        launch(*TWO_BY_EIGHT, "--script", "here.sbatch", "--", *TRAIN)
    assert f"sbatch {tmp_path}/here.sbatch" in raised.value.fix and (tmp_path / "here.sbatch").exists()


def test_what_sbatch_says_against_a_job_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: invalid partition: gpu' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(DrumlineError, match=r"big.sbatch: invalid partition: gpu") as raised:
        launch(*TWO_BY_EIGHT, "--", *TRAIN)
    assert "--sbatch=--OPTION=VALUE" in raised.value.fix


def test_a_job_that_cannot_be_submitted_from_here_leaves_nothing_and_the_fix_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "mine.sbatch").write_text("mine\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for script in ("new/folders/here.sbatch", "mine.sbatch"):
        with pytest.raises(DrumlineError, match="Unable to contact slurm controller") as raised:
            launch(*TWO_BY_EIGHT, "--script", script, "--", *TRAIN)
        assert "cannot reach the SLURM controller" in raised.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.sbatch", "sbatch"]
    assert (tmp_path / "mine.sbatch").read_text() == "mine\n"


SLOW = '''
import os, time
from drumline.model.gpt import GPT

class Slow(GPT):
    """Takes its time for as long as a file is there, so that a test can warn it amid its steps."""
    def forward(self, *args, **kwargs):
        if os.path.exists("slow"):
            time.sleep(0.2)
        return super().forward(*args, **kwargs)
'''


@pytest.fixture
def here(
    tmp_path: Path, text: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder with a name that is hard on scripts, on a host of a SLURM cluster of two nodes."""
    folder = tmp_path / 'it\'s "50%"'
    folder.mkdir()
    text.rename(folder / "text")
    (folder / "slow_model.py").write_text(SLOW)
    with two_nodes(tmp_path_factory.mktemp("slurm")) as environ:
        monkeypatch.setenv("SLURM_CONF", environ["SLURM_CONF"])
        monkeypatch.chdir(folder)
        yield folder


def shown(number: str) -> dict[str, str]:
    """What SLURM says of a job."""
    said = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"(\w+)=(\S*)", said))


def submitted(said: str) -> str:
    job_line = re.search(r"^job (\d+) submitted", said, re.MULTILINE)
    assert job_line, said
    return job_line[1]


@pytest.mark.long
@pytest.mark.needs("slurm")
def test_a_job_that_is_warned_saves_is_queued_again_and_ends_with_the_weights_of_an_undisturbed_run(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 40
    model = ("--model", "slow_model:Slow", "--bitwise", "--total_steps", str(steps), "--save_every", "1000")
    flags = small("--batch_size", "2", "--global_batch_size", "8", *model)
    cluster = ("--nodes", "2", "--gpus_per_node", "1", "--time", "10")
    (here / "slow").touch()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(warm_programs(here / "programs") / "python"))
        assert launch(*cluster, "--", "train", *flags, "--train_data_path", "text", "--run_dir", "runs/big") == 0
        number = submitted(capsys.readouterr().out)
        assert launch(*cluster, "--", "train", *flags, "--train_data_path", "nowhere", "--run_dir", "runs/bad") == 0
        mistaken = submitted(capsys.readouterr().out)
    output, metrics = here / f"runs/big-{number}.out", here / "runs/big/metrics.jsonl"

    def said() -> str:
        return output.read_text() if output.exists() else f"nothing; {shown(number)}"

    assert wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2), said()
    # What SLURM itself does when the time is nearly up: to all processes of all steps, not to the script.
    subprocess.run(["scancel", "--signal=USR1", number], check=True)
    assert wait_until(lambda: (shown(number)["Restarts"], shown(number)["JobState"]) == ("1", "PENDING")), said()
    stopped = RunFolder(here / "runs/big").read_status()
    assert stopped["state"] == "stopped" and 0 < stopped["step"] < steps, said()
    assert "requeued" in said()

    (here / "slow").unlink()
    # SLURM lets a job that was requeued wait for two minutes. Within the second it ended in it must not start.
    subprocess.run(["scontrol", "update", f"jobid={number}", "StartTime=now+3"], check=True)
    assert wait_until(lambda: shown(number)["JobState"] == "COMPLETED"), said()
    assert f"(step {stopped['step']})" in said() and shown(number)["ExitCode"] == "0:0"
    finished = RunFolder(here / "runs/big").read_status()
    assert finished["state"] == "finished"
    losses = [record["step"] for record in read_metrics(metrics) if "loss" in record]
    assert losses == list(range(1, steps + 1))
    (outcome,) = train_ranks(1, *flags, "--train_data_path", "text", "--run_dir", "alone")
    assert outcome.code == 0, outcome.err
    assert RunFolder(here / "alone").read_status()["weights_sha256"] == finished["weights_sha256"]

    assert wait_until(lambda: shown(mistaken)["JobState"] == "FAILED"), shown(mistaken)
    assert shown(mistaken)["ExitCode"] == "1:0" and shown(mistaken)["Restarts"] == "0"
    assert "nowhere" in (here / f"runs/bad-{mistaken}.out").read_text()
