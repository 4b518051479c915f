"""A drumline command -> the same run on many hosts: over SSH, under SLURM, in Kubernetes.

ssh: starts, follows and ends it (hosts_file: which hosts; ssh_plan: what each runs; ssh_checks: whether they are fit;
ssh_sessions: one ssh to each; remote_agent: what that starts there). slurm, kubernetes: a job's script or manifest.
job_command: the command of a job's hosts.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.launch.hosts_file import parse_hosts
    from drumline.launch.job_command import Check, write_file
    from drumline.launch.kubernetes import K8sConfig, K8sJob
    from drumline.launch.slurm import SlurmConfig, SlurmJob, submit
    from drumline.launch.ssh import launch
    from drumline.launch.ssh_plan import describe, make_plan, passed_on

__getattr__, __dir__, __all__ = public(__name__, __file__)
