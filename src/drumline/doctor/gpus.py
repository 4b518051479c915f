"""The state of each GPU, and whether matmuls give correct results on GPUs and on the CPU.

Matmuls are checked with integers whose exact result is known and representable in the dtype, whatever the order of
summation: any element that differs is wrong.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.doctor.finding import Finding, State
from drumline.doctor.machine import as_root, in_container
from drumline.elastic import die_with_parent
from drumline.report import command

if TYPE_CHECKING:  # the doctor must also report a torch that cannot be imported
    import torch

    Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_GIB = 1 << 30
_DRIVER = "apt install nvidia-driver-570"
_SMI_TIMEOUT_S = 5.0
_PRODUCTS_TIMEOUT_S = 10.0
_HOT_C = 87
_INNER = 1024
"""Terms per dot product: the largest is just below 2^24, up to which float32 represents all integers."""
_LARGEST = {"float32": 127, "bfloat16": 15}
"""Factors up to this are exact, and so is 1024 times the product of two of them."""
_SIZES = {"cpu": 512, "cuda": 4096}
_ROUNDS = 3

# Bits of clocks_throttle_reasons.active, as in NVML; the others are idle, user-set limits, and the power cap, which
# every busy GPU reaches.
_SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "the power supply"}
_FIELDS = (
    "uuid temperature.gpu ecc.errors.uncorrected.volatile.total driver_version power.limit "
    "clocks_throttle_reasons.active"
).split()


@dataclass(frozen=True, kw_only=True)
class Smi:
    """What nvidia-smi reports about one GPU; None if unknown."""

    uuid: str
    temperature_c: int | None = None
    ecc_errors: int | None = None
    driver: str = ""
    power_limit_w: float | None = None
    slowdown: str = ""
    """Why its clock is throttled; empty: it is not."""


def read_smi() -> list[Smi]:
    """What nvidia-smi reports about every GPU in the machine, regardless of CUDA_VISIBLE_DEVICES."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    for fields in (_FIELDS, _FIELDS[:-1]):  # one field that the driver does not know fails the whole query
        command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        if answer.returncode == 0:
            return [_parsed(line) for line in answer.stdout.splitlines() if line.count(",") == len(fields) - 1]
    return []


def _parsed(line: str) -> Smi:
    uuid, temperature, ecc, driver, power, *rest = (part.strip() for part in line.split(","))
    reasons = int(rest[0], 16) if rest and rest[0].startswith("0x") else 0
    return Smi(
        uuid=uuid.removeprefix("GPU-"),
        temperature_c=int(temperature) if temperature.isdigit() else None,
        ecc_errors=int(ecc) if ecc.isdigit() else None,
        driver=driver,
        power_limit_w=float(power) if power.replace(".", "").isdigit() else None,
        slowdown=next((why for bit, why in _SLOWDOWNS.items() if reasons & bit), ""),
    )


def installed_gpus(pci: Path = Path("/sys/bus/pci/devices")) -> int:
    """Number of NVIDIA GPUs in this machine, with or without a driver. Takes no time."""
    gpus = 0
    for device in pci.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        gpus += vendor.strip() == "0x10de" and kind.startswith("0x03")
    return gpus


def cuda_trouble() -> str:
    """Why torch finds no GPU, in CUDA's words; empty if it finds one."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return ""
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:
            return " ".join(str(error).split())
    return "no GPU was found"


def check_cuda(
    *, built_for: str | None, trouble: str, installed: int, environ: Mapping[str, str], needed: bool = False
) -> Finding:
    """Whether torch can use the machine's GPUs.

    built_for: CUDA version of this torch build; None: a CPU build
    trouble:   why torch finds no GPU; empty if it finds one
    installed: number of GPUs in the machine
    needed:    whether the run needs a GPU
    """
    if built_for is not None and not trouble:
        return Finding("CUDA", "ok", f"torch is built for CUDA {built_for}")
    if not installed and not needed:
        build = "torch is built without CUDA" if built_for is None else f"torch is built for CUDA {built_for}"
        return Finding("CUDA", "ok", f"{build}; there is no NVIDIA GPU, so training runs on the CPU")
    why, fix, grave = _no_gpu(built_for, trouble, installed, environ.get("CUDA_VISIBLE_DEVICES"))
    state: State = "failed" if needed or grave else "warning"
    return Finding("CUDA", state, f"there is no cuda device on this machine for torch: {why}", fix)


def _no_gpu(built_for: str | None, trouble: str, installed: int, visible: str | None) -> tuple[str, str, bool]:
    """Why torch cannot use a GPU, the fix, and whether it is certainly unintended."""
    if not installed:
        return trouble or "it is built without CUDA, and there is no GPU", command("train", "--device", "cpu"), False
    if built_for is None:
        return "it is built without CUDA", "pip install --force-reinstall torch", False
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is {visible.strip() or 'empty'}", "unset CUDA_VISIBLE_DEVICES", False
    if "too old" in trouble:
        return f"the driver is too old for CUDA {built_for} ({trouble})", as_root(_DRIVER), True
    if in_container():
        return trouble, "docker run --gpus all ...", False
    return trouble, as_root(_DRIVER), True


def check_gpu(
    index: int, name: str, *, total_bytes: int, free_bytes: int, smi: Smi | None, wrong: Mapping[str, int], without: str
) -> Finding:
    """The most serious problem of one GPU, or that it is fine.

    index:   torch's number, which differs from nvidia-smi's
    wrong:   number of wrong matmul elements, by dtype
    without: the value of CUDA_VISIBLE_DEVICES that excludes this GPU
    """
    check, smi = f"GPU {index}", smi or Smi(uuid="")
    out = f"export CUDA_VISIBLE_DEVICES={without}"
    for dtype, elements in wrong.items():
        if elements:
            of = f"{elements:,} of {_ROUNDS * _SIZES['cuda'] ** 2:,} elements of a {dtype} matmul"
            return Finding(check, "failed", f"{name} computes wrong results: {of}; exclude it", out)
    if smi.ecc_errors:
        what = f"{name} has had {smi.ecc_errors:,} uncorrectable ECC memory errors since its last reset"
        return Finding(check, "warning", what, f"sudo nvidia-smi --gpu-reset -i GPU-{smi.uuid}")
    if smi.slowdown or (smi.temperature_c or 0) >= _HOT_C:
        at = "" if smi.temperature_c is None else f" at {smi.temperature_c} °C"
        what = f"{name} is throttled by {smi.slowdown or 'heat'}{at}"
        return Finding(check, "warning", what, f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i GPU-{smi.uuid}")
    if free_bytes < total_bytes // 2:
        taken = f"{(total_bytes - free_bytes) / _GIB:.0f} of {total_bytes / _GIB:.0f} GiB"
        what = f"{name}: {taken} of its memory are used by other processes"
        return Finding(
            check, "warning", what, "nvidia-smi --query-compute-apps=gpu_uuid,pid,name,used_memory --format=csv"
        )
    facts = [
        f"{name}, {free_bytes / _GIB:.0f} of {total_bytes / _GIB:.0f} GiB free",
        f"{smi.temperature_c} °C" if smi.temperature_c is not None else "",
        "no ECC errors" if smi.ecc_errors == 0 else "",
        f"{smi.power_limit_w:.0f} W" if smi.power_limit_w else "",
        f"driver {smi.driver}" if smi.driver else "",
        f"{' and '.join(wrong)} matmuls correct" if wrong else "",
    ]
    return Finding(check, "ok", ", ".join(fact for fact in facts if fact))


def look_at_gpus(environ: Mapping[str, str], smis: Sequence[Smi]) -> list[Finding]:
    """Check every visible GPU, with a matmul on each."""
    import torch

    findings = []
    count = torch.cuda.device_count()
    names = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    names = names if len(names) == count else [str(index) for index in range(count)]
    for index in range(count):
        device = torch.device("cuda", index)
        facts = torch.cuda.get_device_properties(device)
        uuid = str(getattr(facts, "uuid", "")).removeprefix("GPU-")
        smi = next((each for each in smis if each.uuid == uuid), None)
        try:
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            roomy = free_bytes > _GIB  # on a full GPU a matmul would fail through no fault of its own
            wrong = {dtype: wrong_elements(device, dtype) for dtype in _LARGEST if roomy}
        except RuntimeError as error:  # a GPU that does not respond at all
            what = f"{facts.name} fails: {' '.join(str(error).split())[:200]}"
            left = ",".join(names[:index] + names[index + 1 :])
            findings.append(Finding(f"GPU {index}", "failed", what, f"export CUDA_VISIBLE_DEVICES={left}"))
            continue
        findings.append(
            check_gpu(
                index,
                facts.name,
                total_bytes=total_bytes,
                free_bytes=free_bytes,
                smi=smi,
                wrong=wrong,
                without=",".join(names[:index] + names[index + 1 :]),
            )
        )
    return findings


def wrong_elements(device: torch.device, dtype: str, *, rounds: int = _ROUNDS, multiply: Multiply | None = None) -> int:
    """Number of wrong elements in matmuls with a known result.

    Row i of the left factor is a_i times random signs, column j of the right one b_j times the same signs: the result
    is _INNER a_i b_j, and every partial sum is an integer.
    """
    import torch

    size, largest, kind = _SIZES[device.type], _LARGEST[dtype], getattr(torch, dtype)
    random = torch.Generator().manual_seed(0)
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False  # would round partial sums
    try:
        wrong = 0
        for _ in range(rounds):
            a, b = (torch.randint(-largest, largest + 1, (size,), generator=random).float() for _ in range(2))
            signs = torch.randint(0, 2, (_INNER,), generator=random).float() * 2 - 1
            a, b, signs = a.to(device), b.to(device), signs.to(device)
            left, right = torch.outer(a, signs).to(kind), torch.outer(signs, b).to(kind)
            result = (multiply or torch.mm)(left, right)
            wrong += int((result.float() != torch.outer(a, b) * _INNER).sum())
        return wrong
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


def cpu_products() -> dict[str, Any]:
    """Wrong elements and seconds of matmuls on the CPU, by dtype, measured in a child process.

    In a child, because a CPU that advertises instructions it lacks kills the process using them. "ended" is then the
    signal's name, and the missing dtype is the one that was killed.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no threads and waits for none
        child = os.fork()
    if child == 0:
        _compute_and_leave(writing)
    os.close(writing)
    lines, deadline = b"", time.monotonic() + _PRODUCTS_TIMEOUT_S
    try:
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (more := os.read(reading, 4096)):
                break
            lines += more
    finally:
        os.close(reading)
        if time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    products: dict[str, Any] = {}
    for line in lines.splitlines():
        products |= json.loads(line)
    code = os.waitstatus_to_exitcode(status)
    return products | ({"ended": signal.Signals(-code).name} if code < 0 else {})


def _compute_and_leave(writing: int) -> None:
    """Run in the child. Never returns."""
    try:
        die_with_parent()
        faulthandler.disable()  # a crash is an expected outcome, not worth a traceback
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        import torch

        torch.set_num_threads(1)  # thread pools do not survive a fork
        took_s: list[float] = []

        def timed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            began = time.perf_counter()
            product = torch.mm(left, right)
            took_s.append(time.perf_counter() - began)
            return product

        for dtype in _LARGEST:
            wrong = wrong_elements(torch.device("cpu"), dtype, rounds=2, multiply=timed)
            # Time the second call: the first includes setup.
            os.write(writing, json.dumps({dtype: [wrong, took_s[-1]]}).encode() + b"\n")
    finally:
        os._exit(0)


def check_cpu_products(products: Mapping[str, Any], *, needed: bool = False) -> Finding:
    """Judge the result of `cpu_products`.

    needed: whether the run uses bfloat16
    """
    check = "CPU products"
    for dtype in _LARGEST:
        if dtype not in products and products.get("ended") in ("SIGILL", "SIGSEGV", "SIGTRAP"):
            what = (
                f"{dtype} dies of {products['ended']}: this CPU advertises instructions (AMX) that it does not execute"
            )
            what += "; float32, the default of --dtype auto, works" if "float32" in products else ""
            return Finding(check, "failed" if needed else "warning", what, "export ONEDNN_MAX_CPU_ISA=AVX512_CORE")
        if dtype not in products:
            what = f"a {dtype} matmul failed or took more than {_PRODUCTS_TIMEOUT_S:.0f} s"
            return Finding(check, "warning", what, command("train", "--dtype", "float32"))
        if wrong := products[dtype][0]:
            what = f"the CPU computes wrong results: {wrong:,} of {2 * _SIZES['cpu'] ** 2:,} elements in {dtype}"
            return Finding(check, "failed", what, "sudo dmesg | grep -i mce")
    ratio = products["float32"][1] / products["bfloat16"][1]
    if ratio > 1:
        speed = f"bfloat16 is {ratio:.1f}x as fast as float32: try --dtype bfloat16 (auto uses float32 on a CPU)"
    else:
        speed = f"bfloat16 is {1 / ratio:.0f}x slower than float32, which --dtype auto uses"
    return Finding(check, "ok", f"correct; {speed}")
