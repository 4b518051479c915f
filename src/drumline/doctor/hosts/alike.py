"""What the hosts of a run must have in common: versions and data. The host that differs is named, with a fix.

Pure functions: no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drumline.doctor.finding import Finding
from drumline.doctor.hosts.report import BY_MANIFEST, BY_NAME, DIGEST_LETTERS, HostFacts, is_digest, label
from drumline.parallel import odd_ones

_NO_GPU = "none"
"""NCCL version of a host without a GPU that torch can use."""


def compare_versions(hosts: Sequence[HostFacts]) -> list[Finding]:
    """Hosts whose versions differ from most."""
    names = {facts.number: label(facts, hosts) for facts in hosts}
    torch, odd_torch = odd_ones({facts.number: facts.versions.get("torch", "") for facts in hosts})
    lacking: list[Finding] = []
    odd: list[Finding] = []
    for name in ("drumline", "python", "torch", "cuda", "nccl"):
        values = {facts.number: facts.versions[name] for facts in hosts if name in facts.versions}
        if name in ("cuda", "nccl"):  # part of torch
            values = {number: value for number, value in values.items() if number not in odd_torch}
        if name == "nccl":
            lacking += _without_gpu(values, names)
            values = {number: value for number, value in values.items() if value != _NO_GPU}
        usual, numbers = odd_ones(values) if values else ("", [])
        for number in numbers:
            what = f"{names[number]} has {name} {values[number]}, the others {usual}"
            odd.append(Finding("versions", "failed", what, _install(name, usual, torch), names[number]))
    if not odd:
        some = hosts[0].versions
        odd.append(Finding("versions", "ok", ", ".join(f"{name} {value}" for name, value in some.items())))
    return [*lacking, *odd]


def _without_gpu(values: Mapping[int, str], names: Mapping[int, str]) -> list[Finding]:
    """Hosts without a GPU when others have one."""
    lacking = [number for number, value in values.items() if value == _NO_GPU]
    having = [names[number] for number in values if number not in lacking]
    if not having:
        return []
    others = "the others have" if len(lacking) == 1 else f"{', '.join(having)} {'has' if len(having) == 1 else 'have'}"
    return [
        Finding("CUDA", "failed", f"{names[number]} has no usable GPU, {others}", "drumline doctor", names[number])
        for number in lacking
    ]


def _install(name: str, version: str, torch: str) -> str:
    """How to install a version; drumline and its Python are installed from the checkout there."""
    install = "pip install -c constraints.txt -e ."
    if name == "python":
        return f"uv venv --clear --python {version} && uv {install}"
    if name == "drumline":
        return f"git pull && {install}"
    return f"pip install torch=={torch}"


def compare_data(hosts: Sequence[HostFacts], data: Mapping[int, Mapping[str, str]]) -> list[Finding]:
    """Differences in the data that hosts reported, and missing data.

    data: for each host, a digest per file or folder, or what is wrong with it
    """
    by_number = {facts.number: facts for facts in hosts if facts.number in data}
    labels = {number: label(facts, hosts) for number, facts in by_number.items()}
    findings, alike = list[Finding](), list[str]()
    for name in dict.fromkeys(name for files in data.values() for name in files):
        values = {number: data[number].get(name, "missing") for number in by_number}
        usual, odd = odd_ones(values)
        pattern = next(number for number, value in values.items() if value == usual)
        top = name.partition("/")[0]
        there = by_number[pattern].data_paths.get(top, top)
        if not odd and is_digest(usual):
            alike.append(usual)
        elif not odd:
            findings.append(Finding("data", "failed", f"{name} is {usual} on every host", f"ls -l {there}"))
        for number in odd:
            what = f"{name} on {labels[number]} is {_brief(values[number])}, on {labels[pattern]} {_brief(usual)}"
            here = by_number[number].data_paths.get(top, top)
            fix = f"rsync -a {by_number[pattern].host}:{there} {here.removesuffix(top) or './'}"
            findings.append(Finding("data", "failed", what, fix, labels[number]))
    return findings or ([Finding("data", "ok", _how_alike(alike))] if alike else [])


def _how_alike(digests: Sequence[str]) -> str:
    """How many are identical, and how they were compared."""
    folders = sum(digest.endswith(BY_NAME) for digest in digests)
    tokens = sum(digest.endswith(BY_MANIFEST) for digest in digests)
    kinds = [
        (len(digests) - folders - tokens, "file", ""),
        (tokens, "file", BY_MANIFEST),
        (folders, "folder", BY_NAME),
    ]
    parts = [
        f"{count} {noun} is identical{by}" if count == 1 else f"{count} {noun}s are identical{by}"
        for count, noun, by in kinds
        if count
    ]
    return f"on all hosts {', '.join(parts)}"


def _brief(value: str) -> str:
    if not is_digest(value):
        return value
    return f"sha256 {value[:12]}{value[DIGEST_LETTERS:]}"
