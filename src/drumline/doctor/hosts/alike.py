"""What hosts of one run must have alike: versions and data. An odd host is named, with the line that mends it.

Pure: no socket, no clock, no machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from drumline.doctor.finding import Finding
from drumline.doctor.hosts.report import BY_MANIFEST, BY_NAME, DIGEST_LETTERS, HostFacts, is_digest, label

_NO_GPU = "none"
"""What a host without a GPU that torch can use says of its NCCL."""


def compare_versions(hosts: Sequence[HostFacts]) -> list[Finding]:
    """The hosts whose versions are not the usual ones."""
    names = {facts.number: label(facts, hosts) for facts in hosts}
    torch = _usual({facts.number: facts.versions.get("torch", "") for facts in hosts})
    odd_torch = {facts.number for facts in hosts if facts.versions.get("torch", "") != torch}
    found: list[Finding] = []
    for name in ("drumline", "python", "torch", "cuda", "nccl"):
        values = {facts.number: facts.versions[name] for facts in hosts if name in facts.versions}
        if name in ("cuda", "nccl"):  # they come with torch
            values = {number: value for number, value in values.items() if number not in odd_torch}
        if name == "nccl":
            found += _without_gpu(values, names)
            values = {number: value for number, value in values.items() if value != _NO_GPU}
        usual = _usual(values)
        for number, value in values.items():
            if value != usual:
                what = f"{names[number]} has {name} {value}, the others {usual}"
                found.append(Finding("versions", "failed", what, _install(name, usual, torch), names[number]))
    if not any(finding.check == "versions" for finding in found):
        some = hosts[0].versions
        found.append(Finding("versions", "ok", ", ".join(f"{name} {value}" for name, value in some.items())))
    return found


def _without_gpu(values: Mapping[int, str], names: Mapping[int, str]) -> list[Finding]:
    """The hosts that have no GPU where others have one."""
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
    """Drumline and its Python are made in the checkout there."""
    install = "pip install -c constraints.txt -e ."
    if name == "python":
        return f"uv venv --clear --python {version} && uv {install}"
    if name == "drumline":
        return f"git pull && {install}"
    return f"pip install torch=={torch}"


def compare_data(hosts: Sequence[HostFacts], data: Mapping[int, Mapping[str, str]]) -> list[Finding]:
    """What the hosts that told of their data have not alike, or lack.

    data: a digest for each file or folder, or what is wrong with it, by host number
    """
    by_number = {facts.number: facts for facts in hosts if facts.number in data}
    labels = {number: label(facts, hosts) for number, facts in by_number.items()}
    found, alike = list[Finding](), list[str]()
    for name in dict.fromkeys(name for told in data.values() for name in told):
        values = {number: data[number].get(name, "missing") for number in by_number}
        usual = _usual(values)
        pattern = next(number for number, value in values.items() if value == usual)
        top = name.partition("/")[0]
        there = by_number[pattern].data_paths.get(top, top)
        if len(set(values.values())) == 1:
            if is_digest(usual):
                alike.append(usual)
            else:
                found.append(Finding("data", "failed", f"{name} is {usual} on every host", f"ls -l {there}"))
        for number, value in values.items():
            if value != usual:
                what = f"{name} of {labels[number]} is {_brief(value)}, of {labels[pattern]} {_brief(usual)}"
                here = by_number[number].data_paths.get(top, top)
                fix = f"rsync -a {by_number[pattern].host}:{there} {here.removesuffix(top) or './'}"
                found.append(Finding("data", "failed", what, fix, labels[number]))
    return found or ([Finding("data", "ok", _told_alike(alike))] if alike else [])


def _told_alike(digests: Sequence[str]) -> str:
    """How many are alike, and by what they were compared."""
    folders = sum(digest.endswith(BY_NAME) for digest in digests)
    tokens = sum(digest.endswith(BY_MANIFEST) for digest in digests)
    kinds = [
        (len(digests) - folders - tokens, "file", ""),
        (tokens, "file", BY_MANIFEST),
        (folders, "folder", BY_NAME),
    ]
    parts = [
        f"{count} {noun} is alike{by}" if count == 1 else f"{count} {noun}s are alike{by}"
        for count, noun, by in kinds
        if count
    ]
    return f"on all hosts {', '.join(parts)}"


def _usual(values: Mapping[int, str]) -> str:
    """What most have; the first host's where none is more frequent."""
    counts = Counter(values.values())
    return max(values.values(), key=lambda value: (counts[value], value == values[min(values)]), default="")


def _brief(value: str) -> str:
    if not is_digest(value):
        return value
    return f"sha256 {value[:12]}{value[DIGEST_LETTERS:]}"
