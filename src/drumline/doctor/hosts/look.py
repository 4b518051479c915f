"""One host probes another: whether it can be reached, how fast, and how many packets are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from drumline.doctor.hosts.report import HostFacts, Sight, Use
from drumline.network import Ping, Why, address_towards, interface_of, largest_packet, ping, resolve, transfer, why_not

LOOK_S = 30.0
"""Time limit for one probe."""
_CONNECT_S, _OTHER_S, _TRANSFER_S = 3.0, 1.5, 4.0
_MOST_OTHERS, _MOST_PEERS = 4, 16


def peers(own: HostFacts, hosts: Sequence[HostFacts]) -> list[HostFacts]:
    """The hosts that this one probes in turn: in each round, everyone probes another. Only some if there are many."""
    place, count = [each.number for each in hosts].index(own.number), len(hosts)
    turns = range(1, count)
    return [hosts[(place + turn) % count] for turn in turns[:: max(1, -(-len(turns) // _MOST_PEERS))]]


def look_at(own: HostFacts, target: HostFacts, *, clock: Callable[[], float] = time.time) -> list[Sight]:
    """The path from this host to another for gloo, and for NCCL if it uses a different one."""
    uses: list[Use] = ["gloo", "nccl"] if target.nccl not in (None, target.gloo) else ["gloo"]
    means = resolve(target.host)
    name_means = next((address for address in means if address in target.addresses), next(iter(means), ""))
    return [_measured(own, target, replace(_found(own, target, use, clock), name_means=name_means)) for use in uses]


def _found(own: HostFacts, target: HostFacts, use: Use, clock: Callable[[], float]) -> Sight:
    """An address where the target answers: the announced one, or another."""
    announced = target.announced(use)
    why, trip = _tried(target, announced, clock, within_s=_CONNECT_S)
    sight = Sight(own.number, target.number, use, announced or "", why)
    if trip is None:
        for other in [address for address in target.addresses if address != announced][:_MOST_OTHERS]:
            _, trip = _tried(target, other, clock, within_s=_OTHER_S)
            if trip is not None:
                sight = replace(sight, other=other)
                break
    towards = sight.other or sight.address or next(iter(target.addresses), "")
    own_address = address_towards(towards) if towards else None
    sight = replace(sight, own_address=own_address or "")
    return sight if trip is None else replace(sight, rtt_s=trip.rtt_s, skew_s=trip.skew_s)


def _tried(
    target: HostFacts, address: str | None, clock: Callable[[], float], *, within_s: float
) -> tuple[Why, Ping | None]:
    if address is None or address not in target.ports:  # an address that only the machine itself can use
        return "unreachable", None
    try:
        return "", ping(address, target.ports[address][0], target.token, within_s=within_s, clock=clock)
    except OSError as error:
        return why_not(error), None


def _measured(own: HostFacts, target: HostFacts, sight: Sight) -> Sight:
    """Bandwidth, and the largest packet that passes."""
    if not sight.reached:
        return sight
    address = sight.other or sight.address
    port, datagram_port = target.ports[address]
    try:
        sent = transfer(address, port, target.token, within_s=_TRANSFER_S)
    except OSError:  # it answered a moment ago: counts as a stall
        return replace(sight, stalled=True)
    sight = replace(
        sight,
        bytes_per_s=sent.bytes / max(sent.seconds, 1e-9),
        stalled=sent.stalled,
        segments=sent.segments,
        retransmitted=sent.retransmitted,
    )
    if not sent.stalled:
        return sight
    interface = interface_of(sight.own_address, own.interfaces)
    mtu = interface.mtu if interface else 1500
    largest = largest_packet(address, datagram_port, target.token, mtu=mtu, rtt_s=sight.rtt_s)
    return replace(sight, largest_packet=largest)
