"""A drumline command -> the same run on many hosts: over SSH, under SLURM, in Kubernetes.

ssh: starts, follows and stops it (hosts_file: which hosts; ssh_plan: what each runs; ssh_checks: whether they are
ready; ssh_sessions: one ssh per host; remote_agent: what ssh starts there). slurm, kubernetes: job script or manifest.
job_command: the command that a job's hosts run.
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
