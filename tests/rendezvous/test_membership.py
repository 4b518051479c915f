"""Which hosts take part in an attempt, and what they are told of each other."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.rendezvous.membership import GONE_S, LAST_CALL_S, Membership


class Run:
    """Hosts by number: host 3 has the address 10.0.0.3. Host 1 keeps the rendezvous."""

    def __init__(self, *, fewest: int, most: int) -> None:
        self.membership = Membership(fewest=fewest, most=most)
        self.now_s = 0.0
        self.turns = 0

    def join(self, host: int, *, connection: int | None = None, ranks: int = 1) -> None:
        self.turns += 1
        number = connection or host
        self.membership.arrive(number, "" if host == 1 else "10.0.0.1")
        message = {"say": "join", "node": f"n{host}", "turn": self.turns, "ranks": ranks, "address": f"10.0.0.{host}"}
        self.membership.hear(number, message, self.now_s)

    def say(self, host: int, what: str, **more: Any) -> None:
        self.membership.hear(host, {"say": what, **more}, self.now_s)

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        self.membership.advance(self.now_s)

    def numbers(self, *hosts: int) -> list[int | None]:
        return [self.membership.view(host).get("number") for host in hosts]

    def changes(self, *hosts: int) -> list[str | None]:
        return [self.membership.view(host).get("change") for host in hosts]


def together(*hosts: int, fewest: int = 1, most: int = 3) -> Run:
    run = Run(fewest=fewest, most=most)
    for host in hosts:
        run.join(host)
    run.after(LAST_CALL_S)
    return run


def test_all_hosts_together_begin_at_once_and_are_numbered_by_address() -> None:
    run = Run(fewest=3, most=3)
    for host in (10, 9):
        run.join(host, ranks=host)
        assert run.numbers(10, 9) == [None, None]
    run.join(1, ranks=4)
    assert run.numbers(1, 9, 10) == [0, 1, 2]
    view = run.membership.view(9)
    assert view["ranks"] == [4, 9, 10] and view["address"] == "10.0.0.1" and view["change"] == ""


def test_enough_hosts_wait_a_moment_for_more_and_a_single_one_stays_on_its_own_machine() -> None:
    run = Run(fewest=1, most=2)
    run.join(1)
    run.after(LAST_CALL_S / 2)
    assert run.numbers(1) == [None]
    run.after(LAST_CALL_S / 2)
    assert run.numbers(1) == [0] and run.membership.view(1)["address"] == "127.0.0.1"


def test_a_host_that_leaves_during_the_last_call_is_not_counted() -> None:
    run = Run(fewest=2, most=3)
    run.join(1)
    run.join(2)
    run.membership.lose(2, run.now_s)
    run.after(2 * LAST_CALL_S)
    assert run.numbers(1) == [None]
    run.join(3)
    assert run.numbers(1, 3) == [None, None]
    run.after(LAST_CALL_S)
    assert run.numbers(1, 3) == [0, 1]


def test_a_new_host_is_announced_only_if_there_is_room_for_it() -> None:
    run = together(1, 2)
    run.join(3)
    assert run.changes(1, 2) == ["joined", "joined"] and run.numbers(3) == [None]
    for host in (1, 2):
        run.join(host)
    assert run.numbers(1, 2, 3) == [0, 1, 2]
    run.join(4)
    assert run.changes(1, 2, 3) == ["", "", ""] and run.numbers(4) == [None]


def test_a_host_that_starts_again_is_followed_by_the_others() -> None:
    run = together(1, 2, 3)
    run.join(2)
    assert run.changes(1, 3) == ["moved on", "moved on"] and run.numbers(2) == [None]
    run.join(3)
    assert run.changes(1) == ["moved on"]
    run.join(1)
    assert run.numbers(1, 2, 3) == [0, 1, 2] and run.changes(1, 2, 3) == ["", "", ""]


def test_a_host_that_is_gone_is_told_after_a_moment_and_done_without() -> None:
    run = together(1, 2)
    run.membership.lose(2, run.now_s)
    assert run.changes(1) == [""]  # its ranks may notice it themselves, or be saving
    assert run.membership.view(1)["alone"] is True
    run.after(GONE_S + 0.1)
    assert run.changes(1) == ["left"]
    run.join(1)
    run.after(LAST_CALL_S)
    assert run.numbers(1) == [0] and run.membership.view(1)["ranks"] == [1]


def test_a_host_that_moved_on_and_died_is_gone() -> None:
    run = together(1, 2, 3)
    run.join(2)
    run.membership.lose(2, run.now_s)
    run.after(GONE_S + 0.1)
    assert run.changes(1, 3) == ["left", "left"]


def test_a_host_with_a_new_connection_is_not_two_hosts() -> None:
    run = Run(fewest=2, most=2)
    run.join(2)
    run.join(2, connection=7)
    assert run.numbers(2, 7) == [None, None]
    run.join(1)
    assert run.numbers(1, 7) == [0, 1]


def test_hosts_that_finished_may_leave() -> None:
    run = together(1, 2)
    run.say(1, "finished")
    assert run.membership.view(1)["finished"] is False
    run.membership.lose(1, run.now_s)
    run.after(2 * GONE_S)
    assert run.changes(2) == [""]
    run.say(2, "finished")
    assert run.membership.view(2)["finished"] is True


def test_the_first_cause_counts_and_ends_with_its_attempt() -> None:
    run = together(1, 2)
    run.say(2, "cause", cause={"rank": 1})
    run.say(1, "cause", cause={"rank": 0})
    assert run.membership.view(1)["cause"] == {"rank": 1}
    for host in (1, 2):
        run.join(host)
    run.after(LAST_CALL_S)
    assert run.numbers(1, 2) == [0, 1] and run.membership.view(1)["cause"] is None


def test_only_the_first_host_of_an_attempt_chooses_its_port() -> None:
    run = together(1, 2)
    token = run.membership.view(1)["token"]
    run.say(2, "port", port=5, token=token)
    run.say(1, "port", port=6, token="of an earlier attempt")
    assert run.membership.view(2)["port"] is None
    run.say(1, "port", port=7, token=token)
    assert run.membership.view(2)["port"] == 7


def test_the_host_of_the_rendezvous_has_the_address_at_which_others_reach_it() -> None:
    run = Run(fewest=2, most=2)
    run.membership.arrive(5, "")
    run.say(5, "join", node="n", turn=1, ranks=1, address="host-a")
    run.join(2)
    assert run.membership.view(5)["address"] == "10.0.0.1" and run.numbers(5, 2) == [0, 1]


@pytest.mark.parametrize("message", [{}, {"say": "join"}, {"say": "join", "node": 1, "turn": "x"}])
def test_a_message_that_makes_no_sense_changes_nothing(message: dict[str, Any]) -> None:
    run = together(1, 2)
    version = run.membership.version
    with pytest.raises((KeyError, TypeError, ValueError)):
        run.membership.hear(1, message, run.now_s)
    assert run.membership.version == version and run.numbers(1, 2) == [0, 1]
