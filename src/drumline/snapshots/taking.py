"""Takes snapshots while a run trains: copies the state, and lets a thread complete them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from drumline.snapshots.copies import Copies
from drumline.snapshots.folder import Snapshots
from drumline.snapshots.layout import Layout
from drumline.snapshots.memory import threads_for_copies
from drumline.snapshots.remote import Remote
from drumline.snapshots.schedule import Schedule
from drumline.snapshots.slots import Slot, SlotTakenError

Tell = Callable[[str, dict[str, Any]], None]
_RETRY_S = 30.0
"""After there was no room."""


class Taker:
    """One per rank; each takes its part of the state of this host."""

    def __init__(
        self,
        snapshots: Snapshots,
        copies: Copies,
        *,
        place: tuple[int, int],
        device: torch.device,
        token: str,
        every: int | None,
        remote: Remote | None = None,
        tell: Tell,
    ) -> None:
        """
        place: which part of how many on this host
        token: of these ranks: parts of other ones are not of the same snapshot
        every: steps between snapshots; None: as often as costs little
        remote: keeps copies on other hosts
        """
        self._snapshots, self._copies, self._device, self._token, self._tell = snapshots, copies, device, token, tell
        self._part, self._parts = place
        self._remote = remote
        self._schedule = Schedule(every)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._checks = ThreadPoolExecutor(threads_for_copies(), thread_name_prefix="snapshot-check")
        self._slots: list[Slot] = []
        self._prepared: Future[None] | None = None
        self._under_way: Future[Any] | None = None
        self._off = False
        self._retry_at = 0.0

    def is_due(self, step: int) -> bool:
        """Whether to take one after this step; rank 0 decides for all ranks."""
        self.poll()
        return self._schedule.is_due(step, free=self._is_free())

    @property
    def is_under_way(self) -> bool:
        """Whether a snapshot is being completed."""
        return self._under_way is not None

    def prepare(self, tensors: dict[str, Tensor], state_bytes: int) -> None:
        """Reserve the memory, in a thread. tensors: this rank's part"""
        self._prepared = self._thread.submit(self._prepare, Layout.of(tensors), state_bytes)

    def wants_memory(self) -> bool:
        return self._prepared is None and time.monotonic() >= self._retry_at

    def take(self, step: int, about: dict[str, Any], *, began_s: float) -> None:
        """Start a snapshot of what the copies have taken, unless one is under way.

        about: everything that is not a tensor, as JSON; began_s: when training began to wait for it
        """
        self.poll()
        if not self._is_free():
            if self._remote:  # other ranks wait for what this one has
                self._under_way = self._thread.submit(self._remote.exchange, None)
            return
        slot = self._slot_to_write()
        slot.open()
        bring = self._copies.to(slot.layout, slot.data, with_sums=True)
        stall_s = time.monotonic() - began_s
        self._schedule.taken(step)
        self._under_way = self._thread.submit(self._complete, slot, bring, step, about, began_s, stall_s)

    def poll(self) -> None:
        """Once per step: report what the thread has done. Never waits."""
        if self._prepared is not None and self._prepared.done() and (error := self._prepared.exception()) is not None:
            self._switch_off(error)
        if self._under_way is None or not self._under_way.done():
            return
        done, self._under_way = self._under_way, None
        if (error := done.exception()) is not None:
            self._switch_off(error)
            return
        event = done.result()
        if event is None:
            return
        # On a CPU, checksums take time from training as well.
        cost_s = event["stall_s"] + (event["check_s"] if self._device.type == "cpu" else self._copies.device_s)
        self._schedule.measured(cost_s=cost_s, took_s=event["complete_s"])
        self._off = False
        complaint = self._schedule.complaint()
        self._tell(complaint if complaint and self._snapshots.is_said_first("late") else "", event)

    def wait(self) -> None:
        """Until nothing is under way."""
        for each in (self._prepared, self._under_way):
            if each is not None:
                each.exception()

    def forget(self) -> None:
        """Give the slots back, with nothing in them; they are made anew for the next snapshot."""
        self.wait()
        self._give_back()
        self._under_way = None
        self._snapshots.clear()

    def close(self) -> None:
        for threads in (self._thread, self._checks):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._remote:
            self._remote.stop()

    def _give_back(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots, self._prepared = [], None
        if self._remote:
            self._remote.close()

    def _is_free(self) -> bool:
        prepared = self._prepared is not None and self._prepared.done() and self._prepared.exception() is None
        return prepared and self._under_way is None and self._copies.is_free()

    def _prepare(self, layout: Layout, state_bytes: int) -> None:
        if why := self._snapshots.no_room(state_bytes):
            raise OSError(why)
        self._snapshots.make_folder()
        for path in self._snapshots.slots_of(self._part, self._parts):
            self._slots.append(Slot(path, layout, device=self._device))

    def _slot_to_write(self) -> Slot:
        """The one that is not of the newest complete snapshot."""
        newest = next(iter(self._snapshots.complete()), None)
        kept = newest.slots if newest else ()
        return next(slot for slot in self._slots if slot.path not in kept)

    def _complete(
        self,
        slot: Slot,
        bring: Callable[[], list[list[int]] | None],
        step: int,
        about: dict[str, Any],
        began_s: float,
        stall_s: float,
    ) -> dict[str, Any]:
        sealed = False
        try:
            summed = bring()
            copied_s = time.monotonic()
            slot.seal(step, self._token, about, self._checks, summed)
            sealed = True
        finally:
            checked_s = time.monotonic()
            if self._remote:
                self._remote.exchange(slot if sealed else None)
        self._forget_other_parts()
        now_s = time.monotonic()
        times = {"stall_s": stall_s, "copy_s": copied_s - began_s - stall_s, "check_s": checked_s - copied_s}
        if self._remote:
            times["send_s"] = now_s - checked_s
        rounded = {name: round(seconds, 4) for name, seconds in {**times, "complete_s": now_s - began_s}.items()}
        return {"event": "snapshot", "step": step, "bytes": slot.bytes, **rounded}

    def _forget_other_parts(self) -> None:
        """Free the memory that another number of ranks on this host has left, once there is something newer."""
        newest = next(iter(self._snapshots.complete()), None)
        if newest and len(newest.slots) == self._parts:
            self._snapshots.forget_parts(self._parts)

    def _switch_off(self, error: BaseException) -> None:
        """Snapshots are disabled while there is no room for them; reported once. They are tried again later."""
        self._give_back()
        self._retry_at = time.monotonic() + _RETRY_S
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if not self._off and not isinstance(error, SlotTakenError):
            self._tell(f"warning: snapshots are disabled: {why}", {"event": "snapshots off", "why": why})
        self._off = True
