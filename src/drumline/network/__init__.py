"""Addresses, interfaces and sockets -> who can reach whom, or why not."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.network.interfaces import Card as Card
    from drumline.network.interfaces import InfiniBandPort as InfiniBandPort
    from drumline.network.interfaces import address_towards as address_towards
    from drumline.network.interfaces import card_of as card_of
    from drumline.network.interfaces import find_cards as find_cards
    from drumline.network.interfaces import find_infiniband as find_infiniband
    from drumline.network.interfaces import free_port as free_port
    from drumline.network.interfaces import gloo_address as gloo_address
    from drumline.network.interfaces import is_free as is_free
    from drumline.network.interfaces import is_loopback as is_loopback
    from drumline.network.probe import Ping as Ping
    from drumline.network.probe import ProbeServer as ProbeServer
    from drumline.network.probe import Why as Why
    from drumline.network.probe import largest_packet as largest_packet
    from drumline.network.probe import ping as ping
    from drumline.network.probe import resolve as resolve
    from drumline.network.probe import transfer as transfer
    from drumline.network.probe import user_of as user_of
    from drumline.network.probe import why_not as why_not
    from drumline.network.probe import within as within

__getattr__, __dir__, __all__ = public(__name__, __file__)
