"""Whether there is room for what saves and snapshots copy: on each GPU, and in shared memory. As a run will decide."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.snapshots import has_room, slots_bytes

_PCIE_BYTES_PER_S = 25e9
"""To pinned memory, of a GPU with 16 lanes of PCIe 4; more recent ones are up to twice as fast."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What is saved, and how ranks share it."""

    bytes: int
    """Weights and optimizer state."""
    ranks_per_host: int
    hosts: int
    snapshots: bool
    sharing: int = 1
    """Ranks that have a replica between them (--shard)."""
    copies: int = 1
    """Hosts that have each shard of a snapshot (--snapshot_copies)."""

    @property
    def of_host_bytes(self) -> int:
        """What a snapshot takes in the memory of a host."""
        hosts_of_replica = -(-self.sharing // self.ranks_per_host)
        is_only_one = self.sharing == self.ranks_per_host * self.hosts
        return -(-self.bytes // hosts_of_replica) * (min(self.copies, hosts_of_replica) if is_only_one else 1)

    @property
    def on_gpu_bytes(self) -> int:
        """What a rank copies on its GPU, at most: its share of a snapshot on its host, and of a checkpoint of all."""
        if self.sharing > 1:  # its own rows
            return -(-self.bytes // self.sharing)
        saved = -(-self.bytes // (self.ranks_per_host * self.hosts))
        if not self.snapshots:
            return saved
        return -(-self.bytes // self.ranks_per_host) + (saved if self.hosts > 1 else 0)


def on_gpu(state: State, *, free_bytes: int) -> str:
    """free_bytes: of a GPU, besides what steps take"""
    size, what = state.on_gpu_bytes, "saves and snapshots" if state.snapshots else "saves"
    if has_room(size, free_bytes):
        return f"{size / 1e9:.2f} GB more on each GPU, so that {what} hold up training for milliseconds"
    return (
        f"none on the GPU, where {max(0, free_bytes) / 1e9:.2f} GB are left for {size / 1e9:.2f} GB and some to spare: "
        f"{what} hold up training for about {size / _PCIE_BYTES_PER_S:.2g} s each (over PCIe); "
        "a smaller --batch_size makes room"
    )


def in_shared_memory(state: State, *, free_bytes: int) -> str:
    """free_bytes: of this host's /dev/shm, and of its memory"""
    size = slots_bytes(state.of_host_bytes)
    if size <= free_bytes:
        return f"{size / 1e9:.2f} GB of /dev/shm on each host, where {free_bytes / 1e9:.2f} GB are free"
    return (
        f"none: they take {size / 1e9:.2f} GB of /dev/shm, where {free_bytes / 1e9:.2f} GB are free "
        "(a container needs a larger --shm-size); a crash costs the steps since the last checkpoint"
    )
