"""A machine or a cluster -> findings, each with the line to type."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.doctor.checkup import all_findings as all_findings
    from drumline.doctor.checkup import findings_before as findings_before
    from drumline.doctor.checkup import quick_findings as quick_findings
    from drumline.doctor.environment import is_secret as is_secret
    from drumline.doctor.environment import masked as masked
    from drumline.doctor.finding import Finding as Finding
    from drumline.doctor.finding import worst as worst
    from drumline.doctor.hosts.check import HostsReport as HostsReport
    from drumline.doctor.hosts.check import check_hosts as check_hosts
    from drumline.doctor.hosts.collectives import PAIR_COLUMNS as PAIR_COLUMNS
    from drumline.doctor.hosts.collectives import SIZE_COLUMNS as SIZE_COLUMNS
    from drumline.doctor.hosts.meet import CheckEndedError as CheckEndedError
    from drumline.doctor.hosts.meet import Gathering as Gathering
    from drumline.doctor.hosts.meet import approach as approach
    from drumline.doctor.hosts.meet import find_gathering as find_gathering
    from drumline.doctor.hosts.meet import gathering_at as gathering_at

__getattr__, __dir__, __all__ = public(__name__, __file__)
