"""Addresses, interfaces and sockets -> who can reach whom, or why not."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.network.background import in_background, within
    from drumline.network.endpoint import Endpoint
    from drumline.network.interfaces import (
        Card,
        InfiniBandPort,
        address_towards,
        card_of,
        find_cards,
        find_infiniband,
        free_port,
        gloo_address,
        is_free,
        is_loopback,
    )
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

__getattr__, __dir__, __all__ = public(__name__, __file__)
