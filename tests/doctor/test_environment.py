"""Variables that are set are explained, values that hurt are named with what to type, and secrets are not shown."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from drumline.doctor.environment import Facts, check_variables
from drumline.doctor.finding import Finding
from drumline.network.interfaces import Interface, is_free

INTERFACES = (
    Interface("eth1", ("10.0.0.5",), 1500, True),
    Interface("wlan0", (), 1500, True),
    Interface("lo", ("127.0.0.1",), 65536, True),
)


def judged(name: str, value: str, **facts: Any) -> Finding:
    known: dict[str, Any] = {"interfaces": INTERFACES, "cores": 8, "gpus": 4, "infiniband": ["mlx5_0", "mlx5_1"]}
    known |= {"resolves": lambda host: True, **facts}
    (finding,) = check_variables({name: value, "HOME": "/root"}, Facts(**{"port_is_free": lambda port: True, **known}))
    assert finding.check == name
    return finding


@pytest.mark.parametrize(
    ("name", "value", "meaning"),
    [
        ("OMP_NUM_THREADS", "4", "CPU threads per process"),
        ("NCCL_IB_HCA", "mlx5_0", "InfiniBand devices"),
        ("NCCL_IB_HCA", "mlx5", "InfiniBand devices"),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1", "InfiniBand devices"),
        ("NCCL_IB_HCA", "^mlx5_9", "InfiniBand devices"),
        ("NCCL_IB_DISABLE", "0", "disables InfiniBand"),
        ("NCCL_SOMETHING_NEW", "1", "read by NCCL"),
        ("GLOO_SOCKET_IFNAME", "eth1", "network interface"),
        ("NCCL_SOCKET_IFNAME", "eth", "network interfaces"),
        ("NCCL_SOCKET_IFNAME", "=eth1", "network interfaces"),
        ("NCCL_SOCKET_IFNAME", "^docker0", "network interfaces"),
        ("CUDA_VISIBLE_DEVICES", "0,3", "GPUs this process may use"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8f2c", "GPUs this process may use"),
        ("MASTER_ADDR", "10.0.0.5", "rendezvous host"),
        ("MASTER_PORT", "29500", "rendezvous port"),
        ("NCCL_DEBUG", "WARN", "NCCL log level"),
        ("HF_HUB_OFFLINE", "1", "no downloads"),
        ("no_proxy", "localhost", "bypass the proxy"),
    ],
)
def test_a_variable_that_is_set_is_shown_with_what_it_does(name: str, value: str, meaning: str) -> None:
    finding = judged(name, value)
    assert (
        finding.state == "ok"
        and finding.what.startswith(f"is {value}: ")
        and meaning in finding.what
        and not finding.fix
    )


@pytest.mark.parametrize(
    ("name", "value", "state", "fix"),
    [
        ("GLOO_SOCKET_IFNAME", "nope", "failed", "export GLOO_SOCKET_IFNAME=eth1"),
        ("GLOO_SOCKET_IFNAME", "eth", "failed", "export GLOO_SOCKET_IFNAME=eth1"),
        ("GLOO_SOCKET_IFNAME", "wlan0", "failed", "export GLOO_SOCKET_IFNAME=eth1"),
        ("NCCL_SOCKET_IFNAME", "ib", "failed", "export NCCL_SOCKET_IFNAME=eth1"),
        ("MASTER_PORT", "http", "failed", "export MASTER_PORT="),
        ("MASTER_PORT", "70000", "failed", "export MASTER_PORT="),
        ("OMP_NUM_THREADS", "many", "failed", "unset OMP_NUM_THREADS"),
        ("OMP_NUM_THREADS", "0", "failed", "unset OMP_NUM_THREADS"),
        ("OMP_NUM_THREADS", "64", "warning", "export OMP_NUM_THREADS=8"),
        ("CUDA_VISIBLE_DEVICES", "", "warning", "unset CUDA_VISIBLE_DEVICES"),
        ("CUDA_VISIBLE_DEVICES", "-1", "warning", "unset CUDA_VISIBLE_DEVICES"),
        ("CUDA_VISIBLE_DEVICES", "0,4", "failed", "export CUDA_VISIBLE_DEVICES=0"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning", "unset CUDA_LAUNCH_BLOCKING"),
        ("NCCL_P2P_DISABLE", "1", "warning", "unset NCCL_P2P_DISABLE"),
        ("NCCL_IB_DISABLE", "1", "warning", "unset NCCL_IB_DISABLE"),
        ("NCCL_IB_HCA", "=mlx5", "warning", "unset NCCL_IB_HCA"),
        ("NCCL_IB_HCA", "mlx4_0,", "warning", "unset NCCL_IB_HCA"),
        ("NCCL_DEBUG", "info", "warning", "unset NCCL_DEBUG"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warning", "unset TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning", "unset TORCH_DISTRIBUTED_DEBUG"),
        ("TORCHDYNAMO_DISABLE", "1", "warning", "unset TORCHDYNAMO_DISABLE"),
    ],
)
def test_a_value_that_hurts_is_named_with_the_line_to_type(name: str, value: str, state: str, fix: str) -> None:
    finding = judged(name, value)
    assert (finding.state, finding.fix[: len(fix)]) == (state, fix)


def test_infiniband_is_asked_for_or_left_alone_only_where_there_is_some() -> None:
    assert "ignores mlx5_0, mlx5_1" in judged("NCCL_IB_DISABLE", "1").what
    assert judged("NCCL_IB_DISABLE", "1", infiniband=()).state == "ok"
    assert "(it has mlx5_0, mlx5_1)" in judged("NCCL_IB_HCA", "mlx4_0").what
    absent = judged("NCCL_IB_HCA", "mlx5_0", infiniband=())
    assert absent.state == "warning" and "this machine has no InfiniBand: " in absent.what


def test_loopback_is_no_way_to_other_hosts() -> None:
    assert judged("GLOO_SOCKET_IFNAME", "lo").state == "ok"
    assert judged("GLOO_SOCKET_IFNAME", "lo", several_hosts=True).fix == "export GLOO_SOCKET_IFNAME=eth1"
    assert judged("MASTER_ADDR", "127.0.0.1").state == "ok"
    assert judged("MASTER_ADDR", "127.0.0.1", several_hosts=True).state == "warning"
    assert judged("MASTER_ADDR", "::1", several_hosts=True).state == "warning"


def test_a_host_that_has_no_address_and_a_port_that_is_taken_are_found() -> None:
    assert judged("MASTER_ADDR", "nowhere.invalid", resolves=lambda host: False).state == "failed"
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_free(port)
        finding = judged("MASTER_PORT", str(port), port_is_free=is_free)
    assert finding.state == "warning" and finding.fix.startswith("export MASTER_PORT=") and str(port) not in finding.fix


def test_what_is_for_gpus_is_no_matter_without_one_and_what_is_for_compiling_none_without_that() -> None:
    finding = judged("NCCL_P2P_DISABLE", "1", gpus=0)
    assert finding.state == "ok" and finding.what.endswith("no effect without a GPU")
    assert judged("TORCHDYNAMO_DISABLE", "1", compiles=False).state == "ok"


def test_nothing_secret_is_shown() -> None:
    assert "hunter2" not in judged("NCCL_AUTH_TOKEN", "hunter2").what
    assert judged("https_proxy", "http://me:hunter2@proxy:3128").what.startswith("is http://***@proxy:3128: ")


def test_a_value_cannot_draw_on_the_terminal_or_fill_it() -> None:
    assert "\x1b" not in judged("NCCL_ALGO", "\x1b[2Jring").what
    assert len(judged("LD_LIBRARY_PATH", "/lib:" * 100).what) < 150


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_SOKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_SCOKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("GLOO_SOCKET_IFNAMES", "GLOO_SOCKET_IFNAME"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
    ],
)
@pytest.mark.parametrize("gpus", [0, 4])
def test_a_misspelled_variable_is_named_with_what_was_meant(name: str, meant: str, gpus: int) -> None:
    finding = judged(name, "2", gpus=gpus)
    assert finding.state == "warning" and f"nothing reads it; {meant} is what exists" in finding.what
    assert finding.fix == f"export {meant}=${name}; unset {name}"
