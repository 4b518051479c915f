"""How hosts that check each other find their place and each other, and what they compare."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from drumline.data.tokens import FileRecord, Manifest, SplitRecord, split_files
from drumline.doctor.finding import Finding
from drumline.doctor.hosts.check import check_hosts
from drumline.doctor.hosts.rendezvous import Messenger, Rendezvous, find_rendezvous, rendezvous_at
from drumline.doctor.hosts.report import data_hashes, nccl_address, own_facts
from drumline.errors import ConfigError
from drumline.network.interfaces import Interface
from drumline.rendezvous.leader import is_here

TORCHRUN = dict(
    word.split("=")
    for word in (
        "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=host-a "
        "MASTER_PORT=29500"
    ).split()
)
SRUN = dict(
    word.split("=")
    for word in (
        "SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_JOB_ID=1 "
        "SLURM_STEP_NODELIST=n[1-2]"
    ).split()
)


def test_a_place_among_hosts_is_read_from_torchruns_variables() -> None:
    finding = find_rendezvous(TORCHRUN)
    assert finding == Rendezvous(address="host-a", port=29500, hosts=2, keeps=False, leads=False, number=1)
    first = find_rendezvous({**TORCHRUN, "RANK": "0", "GROUP_RANK": "0"})
    assert first is not None and first.keeps and first.leads
    agent = find_rendezvous({**TORCHRUN, "RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent is not None and agent.leads and not agent.keeps
    spare = find_rendezvous({**TORCHRUN, "RANK": "3", "LOCAL_RANK": "1"})
    assert spare is not None and spare.spare


def test_a_place_among_hosts_is_read_from_sruns_variables() -> None:
    finding = find_rendezvous(SRUN)
    assert finding is not None and (finding.hosts, finding.number, finding.names) == (2, 1, ("n1", "n2"))
    assert finding.address == "n1" and not finding.leads and not finding.spare
    spare = find_rendezvous({**SRUN, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"})
    assert spare is not None and spare.spare


def test_a_place_among_hosts_set_by_hand_needs_no_more_than_rank_and_size() -> None:
    finding = find_rendezvous({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host-a"})
    assert finding == Rendezvous(address="host-a", port=29500, hosts=2, keeps=False, leads=False, number=1)


def test_ranks_of_one_host_have_no_other_hosts_to_check() -> None:
    assert find_rendezvous({}) is None
    assert find_rendezvous({**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}) is None


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="GROUP_RANK is 'x'"):
        find_rendezvous({**TORCHRUN, "GROUP_RANK": "x"})


def test_the_host_that_has_the_endpoints_address_keeps_the_store() -> None:
    here = rendezvous_at("127.0.0.1:29777", hosts=2)
    assert here.keeps and here.leads and here.where == "127.0.0.1:29777"
    assert not rendezvous_at("192.0.2.1", hosts=2).keeps
    assert is_here(socket.gethostname())
    for endpoint in ("host-a:x", "host-a:99999", ":29400"):
        with pytest.raises(ConfigError, match="not HOST:PORT") as refused:
            rendezvous_at(endpoint, hosts=2)
        name = endpoint.partition(":")[0] or "HOST"
        assert refused.value.fix == f"as in --rdzv_endpoint {name}:29400"


def test_what_to_type_to_check_again_is_a_whole_command_however_the_hosts_were_started() -> None:
    by_hand = rendezvous_at("192.0.2.1:29400", hosts=2, names=("a", "b"))
    assert by_hand.again == "on every host: drumline doctor --nnodes 2 --rdzv_endpoint 192.0.2.1:29400 --names a,b"
    torchrun, srun = find_rendezvous(TORCHRUN), find_rendezvous(SRUN)
    assert torchrun is not None and srun is not None
    endpoint = "--master_addr=host-a --master_port=29500"
    assert torchrun.again == f"on every host: torchrun --nnodes=2 --node_rank=NUMBER {endpoint} -m drumline doctor"
    assert srun.again == "srun drumline doctor"


def test_ranks_that_are_not_the_first_of_their_host_do_nothing() -> None:
    spare = find_rendezvous({**TORCHRUN, "RANK": "3", "LOCAL_RANK": "1"})
    assert spare is not None
    assert check_hosts(spare, say=print).findings == ()


def test_a_port_that_is_in_use_is_named_with_the_program() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        report = check_hosts(rendezvous_at(f"127.0.0.1:{port}", hosts=2), say=print)
    (finding,) = report.findings
    assert (finding.check, finding.state, report.tells) == (f"port {port}", "failed", True)
    assert f"port {port} on {socket.gethostname()}" in finding.what and "is in use" in finding.what
    assert finding.fix == f"on every host: drumline doctor --nnodes 2 --rdzv_endpoint 127.0.0.1:{port + 1}"


def test_a_meeting_place_that_is_every_host_itself_is_told_with_an_address_for_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    rendezvous = Rendezvous(address="127.0.0.1", port=port, hosts=2, keeps=True, leads=True, number=0)
    (finding,) = check_hosts(rendezvous, say=print, patience_s=0.2).findings
    assert (finding.check, finding.state, finding.host) == ("name", "failed", socket.gethostname())
    assert "every other host itself elsewhere" in finding.what and finding.fix.endswith(f"MASTER_PORT={port}")


def test_a_host_that_never_comes_is_named_by_its_number_or_by_slurms_name() -> None:
    own = socket.gethostname()
    for names, shown in (((), "host 1"), (("n1", "n2"), "n2")):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        rendezvous = Rendezvous(address=own, port=port, hosts=2, keeps=True, leads=True, number=0, names=names)
        report = check_hosts(rendezvous, say=print, patience_s=0.2)
        (finding,) = report.findings
        assert (finding.check, finding.host) == ("rendezvous", shown)
        assert f"1 of 2 hosts joined at {own}:{port}" in finding.what and f"missing: {shown}" in finding.what


def test_hosts_that_are_too_many_or_too_late_are_told_the_whole_command(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr("drumline.doctor.hosts.check.connect", lambda *_, **__: store)
    again = "on every host: drumline doctor --nnodes {} --rdzv_endpoint 192.0.2.1:29400"
    Messenger(store, "").post("roster", {"came": [0], "attendance": Finding("rendezvous", "failed", "").as_dict()})
    for what, fix in (
        ("joined after the others had stopped waiting", f"{again.format(2)} --patience 60"),
        ("joined as host 3 of 2", again.format(3)),
    ):
        (finding,) = check_hosts(rendezvous_at("192.0.2.1", hosts=2), say=print).findings
        assert what in finding.what and (finding.host, finding.fix) == (socket.gethostname(), fix)


def test_nccl_takes_the_interface_that_its_variable_allows() -> None:
    interfaces = [
        Interface(name, (f"10.0.{i}.1",), 1500, True) for i, name in enumerate(["docker0", "eth0", "eth10", "ib0"])
    ]
    wanted = {"": "10.0.3.1", "eth1": "10.0.2.1", "=eth0": "10.0.1.1", "^ib,docker": "10.0.1.1", "wlan": None}
    for value, expected in wanted.items():
        assert nccl_address({"NCCL_SOCKET_IFNAME": value}, interfaces) == expected, value


def test_a_file_is_compared_by_content_and_a_folder_by_names_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a")
    (tmp_path / "tokenizer.json").write_text("{}")
    folder, file = data_hashes(tmp_path / "text"), data_hashes(tmp_path / "tokenizer.json")
    assert list(folder) == ["text"] and list(file) == ["tokenizer.json"]
    assert folder["text"].endswith(" by name and size") and len(file["tokenizer.json"]) == 64
    (tmp_path / "text" / "b.txt").write_text("b")
    assert data_hashes(tmp_path / "text") != folder
    assert data_hashes(tmp_path / "nothing") == {"nothing": "missing"}
    os.rename(tmp_path / "tokenizer.json", tmp_path / "other.json")
    assert list(data_hashes(tmp_path / "other.json").values()) == list(file.values())


def test_of_a_prepared_folder_the_tokenizer_is_read_and_tokens_of_another_size_are_told(tmp_path: Path) -> None:
    names = ["tokenizer.json", *(name for split in ("train", "valid") for name in split_files(split))]
    for name in names:
        (tmp_path / name).write_text("{}")
    Manifest(
        drumline_version="0",
        source="",
        source_key="",
        key="",
        vocab_size=256,
        end_of_text=0,
        splits={split: SplitRecord(1, 1, 1) for split in ("train", "valid")},
        files={name: FileRecord(2, "a" * 64) for name in names},
    ).write(tmp_path)
    whole = data_hashes(tmp_path)
    key = f"{tmp_path.name}/train.bin"
    assert whole[key] == "a" * 64 + " by manifest and size"
    (tmp_path / "train.bin").write_text("{}{")
    (tmp_path / "valid.bin").unlink()
    (tmp_path / "tokenizer.json").write_text("[]")
    changed = data_hashes(tmp_path)
    assert changed[key] == "3 bytes, but 2 in its manifest" and changed[f"{tmp_path.name}/valid.bin"] == "missing"
    read = f"{tmp_path.name}/tokenizer.json"
    assert len(changed[read]) == 64 and changed[read] != whole[read]
    assert own_facts(0, {}, data=[tmp_path, tmp_path / "train.bin"]).hashed_bytes == 2 + 3
