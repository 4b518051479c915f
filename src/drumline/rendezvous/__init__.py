"""Many hosts -> one attempt: who takes part, in which order, and where rank 0 listens.

`joining` is what a supervisor asks; `leader` decides which host runs the `server`, which keeps the `membership` of
all hosts. Alone, a host has nobody to agree with.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.rendezvous.joining import Hosts, HostsRendezvous, Rendezvous
    from drumline.rendezvous.leader import Lease, RendezvousPoint, is_here, listens_at

__getattr__, __dir__, __all__ = public(__name__, __file__)
