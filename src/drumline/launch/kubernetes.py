"""Kubernetes: the manifest of a run, one pod per host: an Indexed Job with a headless service, or a Kubeflow TrainJob.

Every pod runs drumline's own supervisor; the rendezvous is at the first pod's name. A pod that was evicted, and saved,
is replaced without counting as a failure; a configuration error or a failed run ends the job, since a retry would fail
again. The restarts of a TrainJob are up to its runtime.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from drumline.config import RENDEZVOUS_PORT
from drumline.doctor import is_secret
from drumline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE, EXIT_USER, ConfigError
from drumline.files import RunFolder
from drumline.launch.job_command import JobCommand
from drumline.network import SECRET, SECRET_FILE

Kind = Literal["job", "trainjob"]

_LONGEST_NAME = 52
"""A host name is the job's name plus the pod's index, a pod name has six more characters; labels end at 63."""
_LONGEST_DEFAULT = 40
_TRAINER_ROLE = "node"
"""The name of the replicated job, and of its container, in Kubeflow's training runtimes."""
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MEMORY = "shared-memory"

Tree = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class K8sConfig:
    """Resources of a Kubernetes job."""

    nodes: int
    """Number of pods, one per host if each takes all of its GPUs."""
    gpus_per_node: int
    """GPUs per pod, with one rank each. 0: no GPUs."""
    image: str
    """Container image that has drumline installed."""
    name: str | None = None
    """Job name. Default: the name of the run folder."""
    namespace: str | None = None
    """Namespace. Default: kubectl's current one."""
    kind: Kind = "job"
    """job: an Indexed Job with a headless service; trainjob: a TrainJob for Kubeflow Trainer 2.3 or later."""
    claim: tuple[str, ...] = ()
    """PersistentVolumeClaim and its mount path, as NAME:/mount; --run_dir must be on one. May be repeated."""
    shm: str = "16Gi"
    """Size limit of /dev/shm."""
    env: tuple[str, ...] = ()
    """Environment variable for all pods, as NAME=VALUE. May be repeated."""
    env_from_secret: tuple[str, ...] = ()
    """Environment variable from a Secret, as NAME=SECRET or NAME=SECRET:KEY. May be repeated."""
    max_restarts: int = 6
    """Number of times that crashed pods are replaced; with a TrainJob, its runtime decides."""
    grace_s: int = 300
    """Grace period in seconds for a pod to save before it is killed."""

    def __post_init__(self) -> None:
        longest = _LONGEST_NAME - (len(f"-{_TRAINER_ROLE}-0") if self.kind == "trainjob" else 0)
        if self.name is not None and (not _LABEL.fullmatch(self.name) or len(self.name) > longest):
            raise ConfigError(
                f"--name {self.name!r} is not a valid name: lowercase letters, digits and -, at most {longest}",
                fix=f"as in --name {label_of(self.name)[:longest].rstrip('-')}",
            )
        if self.namespace is not None and not _NAME.fullmatch(self.namespace):
            raise ConfigError(
                f"--namespace {self.namespace!r} is invalid", fix=f"as in --namespace {label_of(self.namespace)}"
            )
        if not _QUANTITY.fullmatch(self.shm):
            raise ConfigError(f"--shm {self.shm!r} is not an amount of memory", fix="as in --shm 16Gi")
        if self.max_restarts < 0 or self.grace_s < 1:
            raise ConfigError(
                f"--max_restarts {self.max_restarts} --grace_s {self.grace_s} is out of range",
                fix="as in --max_restarts 6 --grace_s 300",
            )
        if not self.image or self.image.strip() != self.image:
            raise ConfigError(f"--image {self.image!r} is not an image", fix="as in --image ghcr.io/me/drumline:1.0")
        self.mounts()
        self.variables()

    def mounts(self) -> list[tuple[str, str]]:
        """Claims and their mount paths."""
        pairs = [tuple(claim.split(":", 1)) for claim in self.claim]
        for claim, parts in zip(self.claim, pairs, strict=True):
            if len(parts) != 2 or not _NAME.fullmatch(parts[0]) or not parts[1].startswith("/"):
                raise ConfigError(f"--claim {claim!r} is not NAME:/MOUNT", fix="as in --claim training-data:/data")
        return [(parts[0], parts[1]) for parts in pairs]

    def variables(self) -> list[Tree]:
        """The container's environment. Secrets are referenced by name, without their value."""
        variables: list[Tree] = []
        for entry in self.env:
            name, value = _parted(entry, "env", "NCCL_DEBUG=INFO")
            if is_secret(name):
                raise ConfigError(
                    f"--env {name}=... would write a secret to the manifest",
                    fix=f"write {name}=... to FILE, kubectl create secret generic drumline --from-env-file FILE, and "
                    f"--env_from_secret {name}=drumline",
                )
            variables.append({"name": name, "value": _literal(value)})
        for entry in self.env_from_secret:
            name, source = _parted(entry, "env_from_secret", "WANDB_API_KEY=drumline")
            secret, _, key = source.partition(":")
            variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key or name}}})
        return variables


class K8sJob:
    """A drumline command as Kubernetes objects."""

    def __init__(self, words: Sequence[str], config: K8sConfig) -> None:
        self.command = JobCommand(words=tuple(words), nodes=config.nodes, gpus_per_node=config.gpus_per_node)
        self.config = config
        run = PurePosixPath(self.command.run_dir or "").name or f"drumline-{words[0]}"
        self.name = config.name or label_of(run)[:_LONGEST_DEFAULT].rstrip("-")
        if words[0] == "bench" and config.nodes > 1:
            raise ConfigError(
                f"bench runs on one host here, but --nodes is {config.nodes}",
                fix="use --nodes 1, or drumline launch slurm",
            )
        self._check_run_dir()

    def _check_run_dir(self) -> None:
        if (run_dir := self.command.run_dir) is None:
            return
        where = PurePosixPath(run_dir)
        if not any(where.is_relative_to(mount) for _, mount in self.config.mounts()):
            mount = where.parent if where.is_absolute() else PurePosixPath("/runs")
            raise ConfigError(
                f"--run_dir {run_dir} is not on a --claim: its files would be lost with the pod",
                fix=f"add --claim NAME:{mount}, a PersistentVolumeClaim that all pods can write to, and use "
                f"--run_dir {mount / where.name}",
            )

    @property
    def endpoint(self) -> str:
        """HOST:PORT of the rendezvous."""
        if self.config.kind == "trainjob":
            # The runtime sets a variable with the first host's name, which Kubernetes expands in the command.
            return "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
        return f"{self.name}-0.{self.name}:{RENDEZVOUS_PORT}"

    def text(self) -> str:
        """The manifest, ready for kubectl apply.

        As JSON, which is also YAML: no argument, say 3e-4 or no, can be misread as anything but a string.
        """
        documents = self.documents()
        one = documents[0] if len(documents) == 1 else {"apiVersion": "v1", "kind": "List", "items": documents}
        return json.dumps(one, indent=2, ensure_ascii=False) + "\n"

    def documents(self) -> list[Tree]:
        """The objects to create, in order."""
        return [self._train_job()] if self.config.kind == "trainjob" else [self._service(), self._job()]

    def _metadata(self) -> Tree:
        where = {"namespace": self.config.namespace} if self.config.namespace else {}
        return {"name": self.name, **where, "labels": self._labels()}

    def _labels(self) -> Tree:
        return {"app.kubernetes.io/name": "drumline", "app.kubernetes.io/instance": self.name}

    def _service(self) -> Tree:
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods must resolve each other before they are ready
            "selector": self._labels(),
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
        }
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._metadata(), "spec": spec}

    def _job(self) -> Tree:
        container = {
            "name": "drumline",
            "image": self.config.image,
            "command": self._words(),
            **self._environment(),
            **({"resources": self._resources()} if self.command.gpus_per_node else {}),
            "volumeMounts": self._volume_mounts(),
        }
        pod = {
            "subdomain": self.name,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.config.grace_s,
            "containers": [container],
            "volumes": self._volumes(),
        }
        spec = {
            "completionMode": "Indexed",
            "completions": self.command.nodes,
            "parallelism": self.command.nodes,
            "backoffLimit": self.config.max_restarts,
            "podFailurePolicy": {"rules": _rules()},
            "template": {"metadata": {"labels": self._labels()}, "spec": pod},
        }
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._metadata(), "spec": spec}

    def _train_job(self) -> Tree:
        trainer = {
            "numNodes": self.command.nodes,
            "image": self.config.image,
            "command": self._words(),
            **self._environment(),
            **({"resourcesPerNode": self._resources()} if self.command.gpus_per_node else {}),
        }
        pod = {
            "terminationGracePeriodSeconds": self.config.grace_s,
            "containers": [{"name": _TRAINER_ROLE, "volumeMounts": self._volume_mounts()}],
            "volumes": self._volumes(),
        }
        job = {"name": _TRAINER_ROLE, "template": {"spec": {"template": {"spec": pod}}}}
        patch = {"manager": "drumline", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, "runtimePatches": [patch]}
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": self._metadata(),
            "spec": spec,
        }

    def _environment(self) -> Tree:
        variables = self.config.variables()
        given = {SECRET, SECRET_FILE} & {each["name"] for each in variables}
        if self.command.nodes > 1 and self.command.run_dir and not given:
            # A file on the claim that all pods share: nothing to create first, and no secret in the manifest.
            path = str(RunFolder(Path(self.command.run_dir)).leader / "secret")
            variables.append({"name": SECRET_FILE, "value": _literal(path)})
        return {"env": variables} if variables else {}

    def _words(self) -> list[str]:
        plain = self.command.on_each_host(endpoint=self.endpoint)
        return ["drumline", *(word if word == self.endpoint else _literal(word) for word in plain)]

    def _resources(self) -> Tree:
        return {"limits": {"nvidia.com/gpu": str(self.command.gpus_per_node)}}

    def _volume_mounts(self) -> list[Tree]:
        # Shared memory for NCCL and snapshots; the default of /dev/shm is 64 MB.
        places = [(_MEMORY, "/dev/shm")]
        places += [(f"claim-{number}", mount) for number, (_, mount) in enumerate(self.config.mounts())]
        return [{"name": name, "mountPath": mount} for name, mount in places]

    def _volumes(self) -> list[Tree]:
        claims = (
            {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": name}}
            for number, (name, _) in enumerate(self.config.mounts())
        )
        return [{"name": _MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": self.config.shm}}, *claims]


def _rules() -> list[Tree]:
    """How to handle a pod's exit; the first matching rule applies. Everything else counts against max_restarts."""

    def codes(action: str, *values: int) -> Tree:
        return {"action": action, "onExitCodes": {"containerName": "drumline", "operator": "In", "values": [*values]}}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        codes("Ignore", EXIT_STOPPED, EXIT_INTERRUPTED),
        codes("FailJob", EXIT_USER, EXIT_USAGE, EXIT_FAILED),
    ]


def _parted(entry: str, flag: str, example: str) -> tuple[str, str]:
    name, equals, value = entry.partition("=")
    if not equals or not _VARIABLE.fullmatch(name) or (flag == "env_from_secret" and not value.strip(":")):
        shown = name if equals else entry
        raise ConfigError(f"--{flag} {shown!r} does not start with NAME=", fix=f"as in --{flag} {example}")
    return name, value


def _literal(text: str) -> str:
    """Escape an argument: Kubernetes would expand $(NAME)."""
    return text.replace("$", "$$")


def label_of(text: str) -> str:
    """The closest valid Kubernetes name."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return label if label[:1].isalpha() else f"run-{label}".rstrip("-")
