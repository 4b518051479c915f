"""GPUs and what the CPU computes, as the doctor sees them, on machines that have neither fault nor GPU."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from drumline.doctor import gpus
from drumline.doctor.gpus import (
    Smi,
    check_cpu_products,
    check_cuda,
    check_gpu,
    cpu_products,
    read_smi,
    wrong_elements,
)
from drumline.doctor.machine import read_cores

GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, which a test writes."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "nvidia-smi"


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_nvidia_smi_is_asked_for_heat_memory_errors_and_slowdowns(nvidia_smi: Path) -> None:
    script(
        nvidia_smi, "echo 'GPU-aa, 31, 0, 570.1, 700.00, 0x0000000000000001'; echo 'GPU-bb, 90, 2, 570.1, [N/A], 0x40'"
    )
    first, second = read_smi()
    assert first == Smi(uuid="aa", temperature_c=31, ecc_errors=0, driver="570.1", power_limit_w=700.0)
    assert second == Smi(uuid="bb", temperature_c=90, ecc_errors=2, driver="570.1", slowdown="heat")


def test_an_nvidia_smi_that_knows_less_or_fails_is_no_trouble(nvidia_smi: Path) -> None:
    script(nvidia_smi, 'case "$1" in *throttle*) exit 2;; esac; echo "GPU-aa, [N/A], [N/A], 450.2, 300"')
    assert read_smi() == [Smi(uuid="aa", driver="450.2", power_limit_w=300.0)]
    script(nvidia_smi, "echo No devices were found; exit 9")
    assert read_smi() == []


def test_gpus_are_counted_without_a_driver(tmp_path: Path) -> None:
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert gpus.installed_gpus(tmp_path) == 1 and gpus.installed_gpus(tmp_path / "absent") == 0


OLD = "The NVIDIA driver on your system is too old (found version {}). Please update your GPU driver"
NONE = "Found no NVIDIA driver on your system."


@pytest.mark.parametrize(
    ("built_for", "trouble", "installed", "visible", "state", "fix"),
    [
        ("12.8", "", 1, None, "ok", ""),
        ("12.8", NONE, 0, None, "ok", ""),
        (None, "", 0, None, "ok", ""),
        (None, "", 1, None, "warning", "pip install --force-reinstall torch"),
        ("12.8", "No CUDA GPUs are available", 2, "", "warning", "unset CUDA_VISIBLE_DEVICES"),
        ("12.8", OLD.format(11040), 1, None, "failed", "apt install nvidia-driver"),
        ("12.8", NONE, 1, None, "failed", "apt install nvidia-driver"),
    ],
)
def test_why_torch_finds_no_gpu_is_told_with_what_to_type(
    built_for: str | None,
    trouble: str,
    installed: int,
    visible: str | None,
    state: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "in_container", lambda: False)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    finding = check_cuda(built_for=built_for, trouble=trouble, installed=installed, environ=environ)
    assert finding.state == state and fix in finding.fix and bool(finding.fix) == (state != "ok")
    needed = check_cuda(built_for=built_for, trouble=trouble, installed=installed, environ=environ, needed=True)
    works = built_for is not None and not trouble
    assert needed.state == ("ok" if works else "failed") and bool(needed.fix) != works


def test_a_gpu_is_hidden_from_a_container_that_was_not_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "in_container", lambda: True)
    finding = check_cuda(built_for="12.8", trouble=NONE, installed=1, environ={})
    assert finding.state == "warning" and finding.fix == "docker run --gpus all ..."


def gpu(**about: Any) -> Any:
    facts = {
        "total_bytes": 80 * GIB,
        "free_bytes": 79 * GIB,
        "smi": None,
        "wrong": {"float32": 0},
        "without": "0,1,2,4",
    }
    return check_gpu(3, "H100", **{**facts, **about})


def test_a_gpu_that_is_well_is_one_line() -> None:
    smi = Smi(uuid="a", temperature_c=31, ecc_errors=0, driver="570.1", power_limit_w=700.0)
    finding = gpu(smi=smi)
    assert finding.state == "ok" and finding.check == "GPU 3"
    assert finding.what == (
        "H100, 79 of 80 GiB free, 31 °C, no ECC errors, 700 W, driver 570.1, float32 matmuls correct"
    )
    assert gpu().what == "H100, 79 of 80 GiB free, float32 matmuls correct"


def test_a_gpu_that_is_not_well_is_named_with_what_to_type() -> None:
    wrong = gpu(wrong={"float32": 0, "bfloat16": 12})
    assert wrong.state == "failed" and wrong.fix == "export CUDA_VISIBLE_DEVICES=0,1,2,4"
    assert "computes wrong results: 12 of 50,331,648 elements of a bfloat16 matmul" in wrong.what
    errors = gpu(smi=Smi(uuid="8f2c", ecc_errors=2))
    assert (
        errors.state == "warning"
        and errors.fix == "sudo nvidia-smi --gpu-reset -i GPU-8f2c"
        and "2 uncorrectable ECC memory errors" in errors.what
    )
    assert "throttled by the power supply" in gpu(smi=Smi(uuid="", slowdown="the power supply")).what
    hot = gpu(smi=Smi(uuid="8f2c", temperature_c=91))
    assert "throttled by heat at 91 °C" in hot.what and hot.fix.endswith(" -i GPU-8f2c")
    taken = gpu(free_bytes=10 * GIB)
    assert (
        taken.state == "warning" and "70 of 80 GiB of its memory are used" in taken.what and "nvidia-smi" in taken.fix
    )


def test_each_gpu_that_torch_may_use_is_looked_at_and_a_bad_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(device: torch.device) -> tuple[int, int]:
        if device.index == 2:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return 79 * GIB if device.index else GIB // 2, 80 * GIB

    def wrong(device: torch.device, dtype: str) -> int:
        return 12 if device.index == 1 and dtype == "bfloat16" else 0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="H100", uuid=device.index)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(gpus, "wrong_elements", wrong)
    smis = [Smi(uuid="3", temperature_c=44), Smi(uuid="7", temperature_c=99)]
    full, bad, dead, fine = gpus.look_at_gpus({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, smis)
    assert full.state == "warning" and "used by other processes" in full.what
    assert (
        bad.state == "failed" and bad.fix == "export CUDA_VISIBLE_DEVICES=4,6,7" and "wrong results: 12 of" in bad.what
    )
    assert dead.state == "failed" and dead.fix == "export CUDA_VISIBLE_DEVICES=4,5,7" and "launch failure" in dead.what
    assert fine.state == "ok" and "44 °C" in fine.what and "float32 and bfloat16 matmuls correct" in fine.what


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_whole_numbers_are_exact_in_any_order_of_summing(dtype: str) -> None:
    def backwards(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(left.shape[0], right.shape[1])
        for start in range(960, -1, -96):
            total += left[:, start : start + 96].float() @ right[start : start + 96].float()
        return total.to(left.dtype)

    assert wrong_elements(CPU, dtype, rounds=1, multiply=backwards) == 0


def test_every_wrong_element_is_counted() -> None:
    def flawed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = left @ right
        product[3, 5:8] += 1
        return product

    assert wrong_elements(CPU, "float32", rounds=2) == 0
    assert wrong_elements(CPU, "float32", rounds=2, multiply=flawed) == 6


def test_the_cpu_is_made_to_compute_in_a_process_of_its_own() -> None:
    before = psutil.Process().children()
    products = cpu_products()
    assert psutil.Process().children() == before
    assert products["float32"][0] == 0
    assert check_cpu_products(products).state in ("ok", "warning")


def test_a_cpu_that_dies_of_bfloat16_is_told_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(writing: int) -> None:
        os.write(writing, b'{"float32": [0, 0.01]}\n')
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGILL)

    monkeypatch.setattr(gpus, "_compute_and_leave", die)
    finding = check_cpu_products(cpu_products())
    assert (
        finding.state == "warning"
        and finding.fix == "export ONEDNN_MAX_CPU_ISA=AVX512_CORE"
        and "SIGILL" in finding.what
    )
    assert check_cpu_products(cpu_products(), needed=True).state == "failed"


def test_products_on_the_cpu_are_judged_by_their_results_and_their_speed() -> None:
    wrong = check_cpu_products({"float32": [7, 0.01], "bfloat16": [0, 0.01]})
    assert wrong.state == "failed" and "7 of 524,288 elements in float32" in wrong.what
    slow = check_cpu_products({"float32": [0, 0.01], "bfloat16": [0, 0.1]})
    assert slow.state == "ok" and "bfloat16 is 10x slower than float32, which --dtype auto uses" in slow.what
    fast = check_cpu_products({"float32": [0, 0.03], "bfloat16": [0, 0.01]})
    assert fast.state == "ok" and re.search(r"bfloat16 is 3.0x as fast as float32: try --dtype bfloat16", fast.what)
    assert check_cpu_products({"float32": [0, 0.03]}).fix == "drumline train --dtype float32"


def test_cores_are_those_this_process_may_use() -> None:
    assert 1 <= read_cores() <= (os.cpu_count() or 1)
