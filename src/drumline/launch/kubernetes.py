"""Kubernetes: the manifest of a run, one pod per host: an Indexed Job with a headless service, or a Kubeflow TrainJob.

Every pod runs drumline's own supervisor; the first one's name is where they meet. A pod that was told to go, and saved,
is replaced without being counted; a user's mistake and a lost run end the job, which would only fail again.
A TrainJob's restarts are its runtime's to decide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from drumline.config import RENDEZVOUS_PORT
from drumline.doctor import is_secret
from drumline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE, EXIT_USER, ConfigError
from drumline.launch.job_command import JobCommand

Kind = Literal["job", "trainjob"]

_LONGEST_NAME = 52
"""A host is called by the job's name and the pod's number, a pod by six letters more; 63 is the longest label."""
_LONGEST_DEFAULT = 40
_TRAINER_ROLE = "node"
"""What Kubeflow's runtimes call the job, and the container in it, that trains."""
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MEMORY = "shared-memory"

Tree = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class K8sConfig:
    """What to ask Kubernetes for."""

    nodes: int
    """Pods, each on a host of its own where it takes all GPUs."""
    gpus_per_node: int
    """GPUs of each pod, with a rank for each. 0: none."""
    image: str
    """A container image with drumline on its path."""
    name: str | None = None
    """Of the job. Default: the run folder's name."""
    namespace: str | None = None
    """Default: kubectl's."""
    kind: Kind = "job"
    """job: an Indexed Job with a headless service; trainjob: a TrainJob of Kubeflow Trainer, 2.3 or later."""
    claim: tuple[str, ...] = ()
    """A PersistentVolumeClaim and where pods see it, as NAME:/mount; --run_dir must lie on one. May be repeated."""
    shm: str = "16Gi"
    """The most memory that /dev/shm may take."""
    env: tuple[str, ...] = ()
    """A variable for all pods, as NAME=VALUE. May be repeated."""
    env_from_secret: tuple[str, ...] = ()
    """A variable whose value is kept in a Secret, as NAME=SECRET or NAME=SECRET:KEY. May be repeated."""
    max_restarts: int = 6
    """How often pods that died of something unknown are replaced; a TrainJob leaves that to its runtime."""
    grace_s: int = 300
    """How many seconds a pod that must go may take to save."""

    def __post_init__(self) -> None:
        longest = _LONGEST_NAME - (len(f"-{_TRAINER_ROLE}-0") if self.kind == "trainjob" else 0)
        if self.name is not None and (not _LABEL.fullmatch(self.name) or len(self.name) > longest):
            raise ConfigError(
                f"--name {self.name!r} is no name for Kubernetes: small letters, digits and -, {longest} at most",
                fix=f"as in --name {label_of(self.name)[:longest].rstrip('-')}",
            )
        if self.namespace is not None and not _NAME.fullmatch(self.namespace):
            raise ConfigError(
                f"--namespace {self.namespace!r} cannot be one", fix=f"as in --namespace {label_of(self.namespace)}"
            )
        if not _QUANTITY.fullmatch(self.shm):
            raise ConfigError(f"--shm {self.shm!r} is no amount of memory", fix="as in --shm 16Gi")
        if self.max_restarts < 0 or self.grace_s < 1:
            raise ConfigError(
                f"--max_restarts {self.max_restarts} --grace_s {self.grace_s} cannot be",
                fix="as in --max_restarts 6 --grace_s 300",
            )
        if not self.image or self.image.strip() != self.image:
            raise ConfigError(f"--image {self.image!r} is no image", fix="as in --image ghcr.io/me/drumline:1.0")
        self.mounts()
        self.variables()

    def mounts(self) -> list[tuple[str, str]]:
        """Claims and where they are seen."""
        pairs = [tuple(claim.split(":", 1)) for claim in self.claim]
        for claim, parts in zip(self.claim, pairs, strict=True):
            if len(parts) != 2 or not _NAME.fullmatch(parts[0]) or not parts[1].startswith("/"):
                raise ConfigError(f"--claim {claim!r} is not NAME:/MOUNT", fix="as in --claim training-data:/data")
        return [(parts[0], parts[1]) for parts in pairs]

    def variables(self) -> list[Tree]:
        """The container's environment. A secret is named, its value never stands here."""
        variables: list[Tree] = []
        for entry in self.env:
            name, value = _parted(entry, "env", "NCCL_DEBUG=INFO")
            if is_secret(name):
                raise ConfigError(
                    f"--env {name}=... would write a secret into the manifest",
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
    """A drumline command as what kubectl creates."""

    def __init__(self, words: Sequence[str], config: K8sConfig) -> None:
        self.command = JobCommand(words=tuple(words), nodes=config.nodes, gpus_per_node=config.gpus_per_node)
        self.config = config
        run = PurePosixPath(self.command.run_dir or "").name or f"drumline-{words[0]}"
        self.name = config.name or label_of(run)[:_LONGEST_DEFAULT].rstrip("-")
        if words[0] == "bench" and config.nodes > 1:
            raise ConfigError(
                f"bench measures one host here, and --nodes is {config.nodes}",
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
                f"--run_dir {run_dir} lies on no --claim: what is saved there is lost with its pod",
                fix=f"add --claim NAME:{mount}, a PersistentVolumeClaim that all pods may write, and give "
                f"--run_dir {mount / where.name}",
            )

    @property
    def meet_at(self) -> str:
        """HOST:PORT where the pods meet."""
        if self.config.kind == "trainjob":
            # The runtime sets variables with the first host's name, and Kubernetes puts them into the command.
            return "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
        return f"{self.name}-0.{self.name}:{RENDEZVOUS_PORT}"

    def text(self) -> str:
        """The manifest, ready for kubectl apply.

        As JSON, which every YAML reader takes too: no word of the command, say 3e-4 or no, can be read as anything
        but text.
        """
        documents = self.documents()
        one = documents[0] if len(documents) == 1 else {"apiVersion": "v1", "kind": "List", "items": documents}
        return json.dumps(one, indent=2, ensure_ascii=False) + "\n"

    def documents(self) -> list[Tree]:
        """What is to be created, in this order."""
        return [self._train_job()] if self.config.kind == "trainjob" else [self._service(), self._job()]

    def _metadata(self) -> Tree:
        where = {"namespace": self.config.namespace} if self.config.namespace else {}
        return {"name": self.name, **where, "labels": self._labels()}

    def _labels(self) -> Tree:
        return {"app.kubernetes.io/name": "drumline", "app.kubernetes.io/instance": self.name}

    def _service(self) -> Tree:
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods look for each other as soon as they start
            "selector": self._labels(),
            "ports": [{"name": "meeting", "port": RENDEZVOUS_PORT}],
        }
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._metadata(), "spec": spec}

    def _job(self) -> Tree:
        container = {
            "name": "drumline",
            "image": self.config.image,
            "command": self._words(),
            **({"env": self.config.variables()} if self.config.variables() else {}),
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
            **({"env": self.config.variables()} if self.config.variables() else {}),
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

    def _words(self) -> list[str]:
        plain = self.command.on_each_host(meet_at=self.meet_at)
        return ["drumline", *(word if word == self.meet_at else _literal(word) for word in plain)]

    def _resources(self) -> Tree:
        return {"limits": {"nvidia.com/gpu": str(self.command.gpus_per_node)}}

    def _volume_mounts(self) -> list[Tree]:
        # Ranks talk and keep snapshots in /dev/shm, which has 64 MB by default.
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
    """How a pod's end is taken; the first rule that fits. What fits none counts against max_restarts."""

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
        raise ConfigError(f"--{flag} {shown!r} does not begin with NAME=", fix=f"as in --{flag} {example}")
    return name, value


def _literal(text: str) -> str:
    """A word that Kubernetes leaves as it is: it would put variables in place of $(NAME)."""
    return text.replace("$", "$$")


def label_of(text: str) -> str:
    """The nearest name that Kubernetes takes."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return label if label[:1].isalpha() else f"run-{label}".rstrip("-")
