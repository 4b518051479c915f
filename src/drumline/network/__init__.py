"""Addresses, interfaces and sockets -> who can reach whom, or why not. Independent of torch.

`endpoint` parses HOST:PORT, `interfaces` lists this machine's addresses, `listening` takes a port, `probe` measures the
path to another host, `wire` carries signed messages, `secret` finds what they are signed with, and `background` runs
calls that may never return.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.network.background import within
    from drumline.network.endpoint import Endpoint
    from drumline.network.interfaces import (
        InfiniBandPort,
        Interface,
        address_towards,
        find_infiniband,
        find_interfaces,
        free_port,
        gloo_address,
        gloo_is_misled,
        interface_of,
        interface_towards,
        is_free,
        is_loopback,
        listener,
    )
    from drumline.network.listening import bound
    from drumline.network.probe import (
        Ping,
        ProbeServer,
        Why,
        largest_packet,
        ping,
        resolve,
        transfer,
        user_of,
        why_not,
    )
    from drumline.network.secret import SECRET, SECRET_FILE, derived, new_secret, run_secret, signed, verified
    from drumline.network.wire import Channel, ForeignError, Line, WireError

__getattr__, __dir__, __all__ = public(__name__, __file__)
