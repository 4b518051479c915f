"""What a container allows, of either version of control groups."""

from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.files import control_groups
from drumline.files.control_groups import NO_LIMIT, read_limits, room_in_container

Contain = Callable[[str, dict[str, str]], None]


@pytest.fixture
def contain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contain:
    """This process is in those groups, which have those files."""
    monkeypatch.setattr(control_groups, "PROC", tmp_path / "own")
    monkeypatch.setattr(control_groups, "ROOT", tmp_path / "root")

    def write(groups: str, files: dict[str, str]) -> None:
        (tmp_path / "own").write_text(groups)
        for name, content in files.items():
            (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "root" / name).write_text(content + "\n")

    return write


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/pod/box\n", {"pod/cpu.max": "150000 100000", "pod/memory.max": "max", "pod/box/memory.max": "1024"}),
        ("0::/\n", {"cpu.max": "150000 100000", "memory.max": "1024"}),
        (
            "2:cpu:/box\n1:memory:/\n0::/\n",
            {
                "cpu/box/cpu.cfs_quota_us": "150000",
                "cpu/box/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "memory/memory.limit_in_bytes": "1024",
            },
        ),
    ],
)
def test_a_containers_limits_are_found_in_either_kind_of_control_group(
    contain: Contain, groups: str, files: dict[str, str]
) -> None:
    assert read_limits() == (float("inf"), NO_LIMIT)
    contain(groups, files)
    assert read_limits() == (1.5, 1024)


@pytest.mark.parametrize(
    ("groups", "files", "room"),
    [
        ("0::/\n", {"memory.max": "1000", "memory.current": "300"}, 700),
        ("0::/\n", {"memory.max": "100", "memory.current": "300"}, 0),
        ("0::/\n", {"memory.max": "max", "memory.current": "300"}, NO_LIMIT),
        ("0::/\n", {}, NO_LIMIT),
        (
            "0::/pod/box\n",
            {
                "pod/memory.max": "900",
                "pod/memory.current": "500",
                "pod/box/memory.max": "1000",
                "pod/box/memory.current": "300",
            },
            400,
        ),
        (
            "0::/\n",
            {
                "memory.max": "1000",
                "memory.current": "990",
                "memory.stat": "file 800\nshmem 500\ninactive_file 200\nactive_file 100",
            },
            310,
        ),
        (
            "1:memory:/box\n0::/\n",
            {
                "memory/box/memory.limit_in_bytes": "1000",
                "memory/box/memory.usage_in_bytes": "990",
                "memory/box/memory.stat": "inactive_file 20\ntotal_inactive_file 300\ntotal_active_file 0",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "5000",
            },
            310,
        ),
    ],
)
def test_the_room_in_a_container_is_what_is_left_without_pages_of_files_that_give_way(
    contain: Contain, groups: str, files: dict[str, str], room: int
) -> None:
    contain(groups, files)
    assert room_in_container() == room
