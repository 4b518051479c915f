"""One run on many hosts: over SSH, under SLURM, in Kubernetes."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.launch.hosts_file import parse_hosts as parse_hosts
    from drumline.launch.job_command import Check as Check
    from drumline.launch.job_command import flag as flag
    from drumline.launch.job_command import write_file as write_file
    from drumline.launch.kubernetes import K8sConfig as K8sConfig
    from drumline.launch.kubernetes import K8sJob as K8sJob
    from drumline.launch.slurm import SlurmConfig as SlurmConfig
    from drumline.launch.slurm import SlurmJob as SlurmJob
    from drumline.launch.slurm import submit as submit
    from drumline.launch.ssh import launch as launch
    from drumline.launch.ssh_plan import describe as describe
    from drumline.launch.ssh_plan import make_plan as make_plan
    from drumline.launch.ssh_plan import passed_on as passed_on

__getattr__, __dir__, __all__ = public(__name__, __file__)
