"""The host of the store exits last, and when it does, nobody is alarmed."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from drumline.doctor.hosts.check import _Check
from drumline.doctor.hosts.rendezvous import CheckEndedError, Messenger
from drumline.network import free_port


def test_a_host_whose_goodbye_is_not_answered_has_its_findings_already() -> None:
    port = free_port()
    store: Any = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    client = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))

    class LeavesAtOnce(Messenger):
        """The host of the store is gone once the message is there, before it can answer."""

        def has(self, key: str) -> bool:
            nonlocal store
            if key == "left/1":
                store = None
            return super().has(key)

    messenger = LeavesAtOnce(client, "host-a")
    messenger.post("left/0", True)
    with pytest.raises(CheckEndedError, match="stopped responding"):
        messenger.post("left/1", True)
    check: Any = SimpleNamespace(_rendezvous=SimpleNamespace(keeps=False), _messenger=messenger)
    _Check._part(check, SimpleNamespace(number=1), [0, 1])  # type: ignore[arg-type]
