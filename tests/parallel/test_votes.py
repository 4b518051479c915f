"""What ranks tell each other through torch's store counts only if it is signed, and few can reach that store."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from drumline.network import new_secret
from drumline.network.interfaces import free_port
from drumline.parallel import ATTEMPT
from drumline.parallel.group import Group, _store
from drumline.parallel.world import Place

KEY = new_secret()


def ranks(store: HashStore, key: str = KEY) -> list[Group]:
    return [Group(Place(rank=rank, size=2), torch.device("cpu"), store, key, itertools.count()) for rank in range(2)]


def test_ranks_with_the_same_key_hear_each_other() -> None:
    one, two = ranks(HashStore())
    other = threading.Thread(target=two.gather, args=({"fine": True},))
    other.start()
    assert one.gather(1) == [1, {"fine": True}]
    other.join()
    one.post("x", [1], instead_of="w")
    assert two.posted(["x"]) == [[1]]


@pytest.mark.parametrize("forged", ["true", "0" * 64 + "true", "not even JSON", "\ud7ff", ""])
def test_a_vote_that_someone_else_wrote_is_not_counted(forged: str) -> None:
    store = HashStore()
    one, _ = ranks(store)
    store.set("drumline/0/1", forged)
    with pytest.raises(RuntimeError, match=r"someone without the run's secret wrote drumline/0/1"):
        one.gather(False)
    store.set("drumline/x", forged)
    with pytest.raises(RuntimeError, match="drumline/x"):
        one.posted(["x"])


def test_a_vote_of_another_turn_rank_or_attempt_is_not_counted() -> None:
    store = HashStore()
    one, two = ranks(store)
    other = threading.Thread(target=one.gather, args=(False,))
    other.start()
    two.gather(True)
    other.join()
    store.set("drumline/1/1", store.get("drumline/0/1").decode())
    with pytest.raises(RuntimeError, match="drumline/1/1"):
        one.gather(False)
    later, _ = ranks(store, new_secret())
    with pytest.raises(RuntimeError, match="drumline/0/1"):
        later.gather(False)


def test_without_a_key_messages_are_plain_json() -> None:
    store = HashStore()
    one, two = ranks(store, "")
    one.post("x", {"a": 1}, instead_of="w")
    assert json.loads(store.get("drumline/x")) == {"a": 1} and two.posted(["x"]) == [{"a": 1}]


def test_the_store_of_supervised_ranks_listens_at_their_address_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTEMPT, str(tmp_path))
    place = Place(rank=0, size=1, master_addr="127.0.0.1", master_port=free_port())
    store = _store(place)
    TCPStore("127.0.0.1", place.master_port, is_master=False).set("a", "b")
    assert store.get("a") == b"b"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", place.master_port), timeout=60)
