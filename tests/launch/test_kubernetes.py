"""`drumline launch k8s`: YAML that Kubernetes and Kubeflow take as it stands, checked against their own schemas."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import App, CycloptsError
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.cli import app as cli
from drumline.cli.jobs import add_jobs
from drumline.errors import DrumlineError
from drumline.launch.kubernetes import K8sConfig, K8sJob, label_of, yaml_of

TRAIN = ("train", "--train_data_path", "/data/tokens", "--run_dir", "/runs/big")
TWO_BY_EIGHT = ("--nodes", "2", "--gpus_per_node", "8", "--image", "ghcr.io/me/drumline:1.0")
CLAIMS = ("--claim", "training-data:/data", "--claim", "runs:/runs")
VERSIONS = ("1.29", "1.31", "1.34", "1.37")


def launch(*words: str) -> Any:
    """`drumline launch k8s` with these words."""
    app = App(name="launch", default_parameter=cli.app.default_parameter, result_action="return_value")
    add_jobs(app, check=lambda given: cli.app.parse_args(list(given), exit_on_error=False, print_error=False))
    return app(["k8s", *words], exit_on_error=False, print_error=False)


def job(*words: str, **more: Any) -> K8sJob:
    asked = {"nodes": 2, "gpus_per_node": 8, "image": "ghcr.io/me/drumline:1.0"}
    return K8sJob(words or TRAIN, K8sConfig(**{**asked, "claim": ("training-data:/data", "runs:/runs"), **more}))


def everything(**more: Any) -> K8sJob:
    return job(namespace="ml", env=("NCCL_DEBUG=INFO",), env_from_secret=("WANDB_API_KEY=wandb:key",), **more)


def pod_of(document: Mapping[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = document["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "made", [everything(), job("doctor", nodes=1, gpus_per_node=0, claim=())], ids=["everything", "least"]
)
def test_kubernetes_knows_every_field_of_the_service_and_the_job(made: K8sJob, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'drumline[dev]'")
    documents = list(yaml.safe_load_all(made.text()))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_are_strict_about_names_that_do_not_exist() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'drumline[dev]'")
    _, document = yaml.safe_load_all(everything().text())
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
    document = yaml.safe_load(made.text())
    # Its models leave out what they do not know, without a word.
    assert models.TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document


def test_each_pod_runs_the_supervisor_of_its_host_and_they_meet_at_the_first() -> None:
    service, document = yaml.safe_load_all(job().text())
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
    ("kind", "meet_at"), [("job", "drumline-doctor-0.drumline-doctor:29400"), ("trainjob", "$(PET_MASTER_ADDR):$(PET")]
)
def test_pods_to_be_checked_meet_too(kind: str, meet_at: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(*TWO_BY_EIGHT, "--kind", kind, "--", "doctor", "--quick") == 0
    *_, document = yaml.safe_load_all(capsys.readouterr().out)
    told = document["spec"]["trainer"] if kind == "trainjob" else pod_of(document)["containers"][0]
    assert told["command"][:4] == ["drumline", "doctor", "--nnodes", "2"] and told["command"][-1] == "--quick"
    assert told["command"][5].startswith(meet_at)
    assert launch("--nodes", "1", *TWO_BY_EIGHT[2:], "--", "doctor") == 0
    assert "--nnodes" not in capsys.readouterr().out


def test_in_a_train_job_they_meet_where_its_runtime_says() -> None:
    trainer = yaml.safe_load(job(kind="trainjob").text())["spec"]["trainer"]
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
    patched = yaml.safe_load(job(kind="trainjob", shm="64Gi", grace_s=900).text())["spec"]["runtimePatches"][0]
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


SCALARS = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(), st.booleans())
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), TREES, min_size=1, max_size=4))
def test_any_tree_is_read_back_as_it_was(tree: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_of(tree)) == tree


@pytest.mark.parametrize("word", ["yes", "No", "null", "~", "1e3", "0x1", "1:30", "", " a", "a: b", "a #b", "-", "---"])
def test_what_yaml_would_take_for_something_else_is_quoted(word: str) -> None:
    assert yaml.safe_load(yaml_of({"word": word, word: 1})) == {"word": word, word: 1}


def test_the_yaml_is_printed_or_written_and_kubectl_named(
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
        ([*CLAIMS, "--", "train"], "no --run_dir"),
        (["--", *TRAIN], "--run_dir /runs/big lies on no --claim"),
        (["--claim", "runs", "--", *TRAIN], "--claim 'runs'"),
        ([*CLAIMS, "--name", "Big_Run", "--", *TRAIN], "--name 'Big_Run'"),
        ([*CLAIMS, "--name", "a" * 53, "--", *TRAIN], "52 at most"),
        ([*CLAIMS, "--name", "a" * 46, "--kind", "trainjob", "--", *TRAIN], "45 at most"),
        ([*CLAIMS, "--namespace", "A B", "--", *TRAIN], "--namespace 'A B'"),
        ([*CLAIMS, "--shm", "much", "--", *TRAIN], "--shm 'much'"),
        ([*CLAIMS, "--env", "A", "--", *TRAIN], "--env 'A'"),
        ([*CLAIMS, "--env_from_secret", "A=", "--", *TRAIN], "--env_from_secret 'A'"),
        ([*CLAIMS, "--grace_s", "0", "--", *TRAIN], "--grace_s 0"),
        ([*CLAIMS, "--image", "", "--", *TRAIN], "--image ''"),
        (["--", "bench"], "bench measures one host"),
        ([*CLAIMS, "--", *TRAIN, "--nnodes", "2"], "--nnodes is the launcher's to set"),
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
