"""`drumline launch k8s`: a manifest that Kubernetes and Kubeflow take as it stands, by their own schemas."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import App, CycloptsError
from hypothesis import given
from hypothesis import strategies as st

from drumline.cli.app import parser
from drumline.cli.launch import add_jobs
from drumline.errors import DrumlineError
from drumline.launch.kubernetes import K8sConfig, K8sJob, label_of

TRAIN = ("train", "--train_data_path", "/data/tokens", "--run_dir", "/runs/big")
TWO_BY_EIGHT = ("--nodes", "2", "--gpus_per_node", "8", "--image", "ghcr.io/me/drumline:1.0")
CLAIMS = ("--claim", "training-data:/data", "--claim", "runs:/runs")
VERSIONS = ("1.29", "1.31", "1.34", "1.37")


def launch(*words: str) -> Any:
    """`drumline launch k8s` with these words."""
    app = App(name="launch", default_parameter=parser().default_parameter, result_action="return_value")
    add_jobs(app, check=lambda given: parser().parse_args(list(given), exit_on_error=False, print_error=False))
    return app(["k8s", *words], exit_on_error=False, print_error=False)


def job(*words: str, **more: Any) -> K8sJob:
    asked = {"nodes": 2, "gpus_per_node": 8, "image": "ghcr.io/me/drumline:1.0"}
    return K8sJob(words or TRAIN, K8sConfig(**{**asked, "claim": ("training-data:/data", "runs:/runs"), **more}))


def everything(**more: Any) -> K8sJob:
    return job(namespace="ml", env=("NCCL_DEBUG=INFO",), env_from_secret=("WANDB_API_KEY=wandb:key",), **more)


def documents(text: str) -> list[dict[str, Any]]:
    """What kubectl would create."""
    read = json.loads(text)
    items: list[dict[str, Any]] = read["items"] if read["kind"] == "List" else [read]
    return items


def pod_of(document: Mapping[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = document["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_pods_share_a_secret_which_no_manifest_holds(kind: str) -> None:
    def variables(**more: Any) -> list[dict[str, Any]]:
        document = job(kind=kind, **more).documents()[-1]
        where = document["spec"]["trainer"] if kind == "trainjob" else pod_of(document)["containers"][0]
        given: list[dict[str, Any]] = where.get("env", [])
        return given

    assert variables() == [{"name": "DRUMLINE_SECRET_FILE", "value": "/runs/big/.leader/secret"}]
    (given,) = variables(env_from_secret=("DRUMLINE_SECRET=drumline",))
    assert given["valueFrom"] == {"secretKeyRef": {"name": "drumline", "key": "DRUMLINE_SECRET"}}
    assert variables(env=("DRUMLINE_SECRET_FILE=/s",)) == [{"name": "DRUMLINE_SECRET_FILE", "value": "/s"}]
    assert variables(nodes=1) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "made", [everything(), job("doctor", nodes=1, gpus_per_node=0, claim=())], ids=["everything", "least"]
)
def test_kubernetes_knows_every_field_of_the_service_and_the_job(made: K8sJob, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'drumline[dev]'")
    items = documents(made.text())
    assert [document["kind"] for document in items] == ["Service", "Job"]
    for document in items:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_are_strict_about_names_that_do_not_exist() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'drumline[dev]'")
    _, document = documents(everything().text())
    pod_of(document)["terminationGraceSeconds"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.34", strict=True)


@pytest.mark.parametrize(
    "made",
    [everything(kind="trainjob"), job("doctor", kind="trainjob", gpus_per_node=0, claim=())],
    ids=["everything", "least"],
)
def test_kubeflow_knows_every_field_of_the_train_job(made: K8sJob) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install 'drumline[dev]'")
    document = json.loads(made.text())
    # Its models leave out what they do not know, without a word.
    assert models.TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document


def test_each_pod_runs_the_supervisor_of_its_host_and_they_meet_at_the_first() -> None:
    service, document = documents(job().text())
    pod = pod_of(document)
    (container,) = pod["containers"]
    meet = ["--nproc", "8", "--nnodes", "2", "--rdzv_endpoint", "big-0.big:29400"]
    assert container["command"] == ["drumline", "train", *meet, *TRAIN[1:]]
    # The name big-0.big is a pod's name and the service it belongs to, known before the pod is ready.
    assert pod["subdomain"] == service["metadata"]["name"] == "big" == document["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == document["spec"]["template"]["metadata"]["labels"]
    assert document["spec"]["completionMode"] == "Indexed"
    assert document["spec"]["completions"] == document["spec"]["parallelism"] == 2
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}


@pytest.mark.parametrize(
    ("kind", "endpoint"), [("job", "drumline-doctor-0.drumline-doctor:29400"), ("trainjob", "$(PET_MASTER_ADDR):$(PET")]
)
def test_pods_to_be_checked_meet_too(kind: str, endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(*TWO_BY_EIGHT, "--kind", kind, "--", "doctor", "--quick") == 0
    *_, document = documents(capsys.readouterr().out)
    container = document["spec"]["trainer"] if kind == "trainjob" else pod_of(document)["containers"][0]
    assert container["command"][:4] == ["drumline", "doctor", "--nnodes", "2"] and container["command"][-1] == "--quick"
    assert container["command"][5].startswith(endpoint)
    assert launch("--nodes", "1", *TWO_BY_EIGHT[2:], "--", "doctor") == 0
    assert "--nnodes" not in capsys.readouterr().out


def test_in_a_train_job_they_meet_where_its_runtime_says() -> None:
    trainer = json.loads(job(kind="trainjob").text())["spec"]["trainer"]
    assert "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)" in trainer["command"]
    assert trainer["numNodes"] == 2 and trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "8"}}


def test_a_preempted_pod_is_replaced_a_mistake_and_a_lost_run_end_the_job_and_anything_else_counts() -> None:
    document = job(max_restarts=4).documents()[1]
    disrupted, stopped, failed = document["spec"]["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Ignore" and disrupted["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert stopped["action"] == "Ignore" and stopped["onExitCodes"]["values"] == [75, 130]
    assert failed["action"] == "FailJob" and failed["onExitCodes"]["values"] == [1, 2, 3]
    (container,) = pod_of(document)["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in (stopped, failed)} == {container["name"]}
    assert pod_of(document)["restartPolicy"] == "Never"  # or the rules would not be asked
    assert document["spec"]["backoffLimit"] == 4


def test_pods_have_shared_memory_the_claims_and_time_to_save() -> None:
    pod = pod_of(job(shm="64Gi", grace_s=900).documents()[1])
    assert pod["terminationGracePeriodSeconds"] == 900
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    seen = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
    assert seen["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert seen["/runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    patched = json.loads(job(kind="trainjob", shm="64Gi", grace_s=900).text())["spec"]["runtimePatches"][0]
    (there,) = patched["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    same = there["template"]["spec"]["template"]["spec"]
    assert same["volumes"] == pod["volumes"] and same["terminationGracePeriodSeconds"] == 900
    assert same["containers"][0]["volumeMounts"] == pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_a_secret_is_named_and_its_value_never_written(kind: str) -> None:
    made = job(kind=kind, env_from_secret=["WANDB_API_KEY=wandb", "HF_TOKEN=hub:token"])
    references = [variable["valueFrom"]["secretKeyRef"] for variable in made.config.variables()]
    assert references == [{"name": "wandb", "key": "WANDB_API_KEY"}, {"name": "hub", "key": "token"}]
    assert "secretKeyRef" in made.text()
    with pytest.raises(DrumlineError) as raised:
        job(kind=kind, env=["WANDB_API_KEY=abc123"])
    assert job(kind=kind, env=["TOKENIZERS_PARALLELISM=true"]).config.variables()[0]["value"] == "true"
    assert "abc123" not in str(raised.value) and "--env_from_secret WANDB_API_KEY=drumline" in raised.value.fix


def test_kubernetes_puts_no_variables_into_what_the_user_wrote() -> None:
    (container,) = pod_of(job(*TRAIN, "--sample_prompt", "$(HOME) $5", env=["A=$(B)"]).documents()[1])["containers"]
    assert container["command"][-1] == "$$(HOME) $$5" and container["env"][0]["value"] == "$$(B)"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0$")))
def test_any_word_is_read_back_as_it_was(word: str) -> None:
    _, document = documents(job(*TRAIN, word).text())
    assert pod_of(document)["containers"][0]["command"][-1] == word


@pytest.mark.parametrize(
    "word", ["yes", "No", "null", "~", "3e-4", "0x1", "1:30", "", " a", "a: b", "a #b", "-", "---"]
)
def test_a_yaml_reader_takes_no_word_for_anything_but_text(word: str) -> None:
    made = job(*TRAIN, word, env=(f"A={word}",))
    read = yaml.safe_load(made.text())
    assert read == json.loads(made.text()) and read["kind"] == "List"
    (container,) = pod_of(read["items"][1])["containers"]
    assert container["command"][-1] == container["env"][0]["value"] == word


def test_the_manifest_is_printed_or_written_and_kubectl_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch(*TWO_BY_EIGHT, *CLAIMS, "--", *TRAIN) == 0
    assert capsys.readouterr().out == job().text() and list(tmp_path.iterdir()) == []
    assert launch(*TWO_BY_EIGHT, *CLAIMS, "--out", "-", "--", *TRAIN) == 0
    assert capsys.readouterr().out == job().text() and list(tmp_path.iterdir()) == []
    assert launch(*TWO_BY_EIGHT, *CLAIMS, "--out", "k8s/big.yaml", "--", *TRAIN) == 0
    assert (tmp_path / "k8s/big.yaml").read_text() == job().text()
    assert "kubectl apply --filename k8s/big.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([*CLAIMS, "--", "train"], "needs --run_dir"),
        (["--", *TRAIN], "--run_dir /runs/big is not on a --claim"),
        (["--claim", "runs", "--", *TRAIN], "--claim 'runs'"),
        ([*CLAIMS, "--name", "Big_Run", "--", *TRAIN], "--name 'Big_Run'"),
        ([*CLAIMS, "--name", "a" * 53, "--", *TRAIN], "at most 52"),
        ([*CLAIMS, "--name", "a" * 46, "--kind", "trainjob", "--", *TRAIN], "at most 45"),
        ([*CLAIMS, "--namespace", "A B", "--", *TRAIN], "--namespace 'A B'"),
        ([*CLAIMS, "--shm", "much", "--", *TRAIN], "--shm 'much'"),
        ([*CLAIMS, "--env", "A", "--", *TRAIN], "--env 'A'"),
        ([*CLAIMS, "--env_from_secret", "A=", "--", *TRAIN], "--env_from_secret 'A'"),
        ([*CLAIMS, "--grace_s", "0", "--", *TRAIN], "--grace_s 0"),
        ([*CLAIMS, "--image", "", "--", *TRAIN], "--image ''"),
        (["--", "bench"], "bench runs on one host"),
        ([*CLAIMS, "--", *TRAIN, "--nnodes", "2"], "--nnodes is set by the launcher"),
    ],
)
def test_mistakes_are_named(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = TWO_BY_EIGHT[:4] if "--image" in words else TWO_BY_EIGHT
    with pytest.raises(DrumlineError) as raised:
        launch(*given, *words)
    assert problem in raised.value.problem and raised.value.fix
    assert capsys.readouterr().out == ""


def test_an_unknown_flag_of_the_command_gets_the_error_that_drumline_itself_gives() -> None:
    with pytest.raises(CycloptsError, match="--total_step"):
        launch(*TWO_BY_EIGHT, *CLAIMS, "--", *TRAIN, "--total_step", "5")


@given(st.text())
def test_a_name_that_is_proposed_is_one_that_kubernetes_takes(text: str) -> None:
    proposed = label_of(text)[:40].rstrip("-")
    assert job(name=proposed).name == proposed


def test_a_job_is_called_by_its_run_folder() -> None:
    assert job("train", "--run_dir", "/runs/7B_Base").name == "run-7b-base"
    assert job("bench", nodes=1).name == "drumline-bench"
