"""A machine or a cluster -> findings, each with the command that fixes it.

finding: the result of one check: ok, warning or failed. checkup: all checks of this machine, or the quick ones before a
run (machine, gpus: hardware and system; environment: variables). hosts/: several hosts check each other. They connect
(rendezvous), describe themselves (report), probe each other (look) and time collectives; the first host judges the
results (judge, alike). check runs all of it.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.doctor.checkup import all_findings, findings_before, quick_findings
    from drumline.doctor.environment import is_secret, masked
    from drumline.doctor.finding import UNWRITABLE, Finding, worst
    from drumline.doctor.hosts.check import HostsReport, check_hosts
    from drumline.doctor.hosts.collectives import PAIR_COLUMNS, SIZE_COLUMNS
    from drumline.doctor.hosts.rendezvous import CheckEndedError, Rendezvous, approach, find_rendezvous, rendezvous_at

__getattr__, __dir__, __all__ = public(__name__, __file__)
