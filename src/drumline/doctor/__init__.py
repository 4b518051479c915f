"""A machine or a cluster -> findings, each with the line to type."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.doctor.checkup import all_findings, findings_before, quick_findings
    from drumline.doctor.environment import is_secret, masked
    from drumline.doctor.finding import UNWRITABLE, Finding, worst
    from drumline.doctor.hosts.check import HostsReport, check_hosts
    from drumline.doctor.hosts.collectives import PAIR_COLUMNS, SIZE_COLUMNS
    from drumline.doctor.hosts.meet import CheckEndedError, Gathering, approach, find_gathering, gathering_at

__getattr__, __dir__, __all__ = public(__name__, __file__)
