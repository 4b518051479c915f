"""Several prepared folders in one setting: `books:0.7,code:0.3`. Parsing, tables of TOML, comparison. No torch here.

    books:0.7,code:0.3                 weights, of any sum
    books:2epochs,code:500Mtokens      amounts of the whole run
    web=/data/web-2024:5,books:1epoch  a name, if the folder's is not wanted; weights share what the amounts leave

A stage is a text, too: `1000-2000 books:0.5,code:0.5` has these weights after step 1000, until step 2000; `80%-` begins
after 80 % of the run and ends with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from drumline.errors import ConfigError, UsageError

Kind = Literal["weight", "epochs", "tokens"]
KINDS: tuple[Kind, ...] = ("weight", "epochs", "tokens")
_PART = re.compile(r"(?P<path>.*?):\s*(?P<amount>[-+\w.]+)\s*(?:,|$)", re.S)
_NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,2})?|nan|inf\w*)"
_AMOUNT = re.compile(rf"({_NUMBER})\s*(epochs?|([kmgbt]?)tokens?)?", re.I)
_NAMED = re.compile(r"([\w.-]+)=(.+)", re.S)
_NAME = re.compile(r"[\w.-]{1,60}")
_PLACE = r"(\d+|\d+(?:\.\d+)?%)?"
_STAGE = re.compile(rf"\s*{_PLACE}\s*-\s*{_PLACE}\s+(.+)", re.S)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
EXAMPLE = "books:0.7,code:0.3 or books:2epochs,code:500Mtokens"


@dataclass(frozen=True)
class MixSource:
    """A prepared folder, and how much of the run is from it."""

    name: str
    path: str
    kind: Kind
    amount: Fraction


@dataclass(frozen=True)
class MixStage:
    """Other weights for a part of the run; a source without one is left out of it."""

    start: int | Fraction
    """After so many steps, or after this fraction of the run."""
    stop: int | Fraction | None
    """None: the end of the run."""
    weights: Mapping[str, Fraction]


def parse_mix(text: str) -> tuple[MixSource, ...]:
    """The sources of `train_data_path`, sorted by name: their order in the text does not matter."""
    sources, at = [], 0
    while at < len(text):
        found = _PART.match(text, at)
        if found is None or not found["path"].strip():
            raise ConfigError(
                f"train_data_path {text!r} has a part without an amount, {text[at:]!r}", fix=f"write it as {EXAMPLE}"
            )
        path = found["path"].strip()
        named = None if os.path.exists(path) else _NAMED.fullmatch(path)
        name, path = named.groups() if named else (_default_name(path), path)
        sources.append(MixSource(_checked_name(name), path, *_amount(name, found["amount"])))
        at = found.end()
    _refuse_doubles(sources)
    return tuple(sorted(sources, key=lambda each: each.name))


def parse_stages(texts: Iterable[str], names: Iterable[str]) -> tuple[MixStage, ...]:
    """The stages of a mix with these sources, in the order in which they come."""
    return tuple(_stage(text, list(names)) for text in texts)


def _stage(text: str, names: list[str]) -> MixStage:
    found = _STAGE.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"the stage {text!r} does not say from which step to which",
            fix="write it as '1000-2000 books:0.5,code:0.5' (steps) or '80%- books:1' (the last fifth of the run)",
        )
    start, stop = (None if each is None else _place(each) for each in found.groups()[:2])
    weights: dict[str, Fraction] = {}
    for part in found[3].split(","):
        name, _, amount = (each.strip() for each in part.rpartition(":"))
        if name not in names or name in weights:
            raise ConfigError(
                f"the stage {text!r} has {'twice ' if name in weights else 'no source of the mix: '}{name or part!r}",
                fix=f"write each source once, with its weight; the mix has {', '.join(names)}",
            )
        kind, weights[name] = _amount(name, amount)
        if kind != "weight":
            raise ConfigError(f"the stage {text!r} has {kind} of {name}", fix="give each source of a stage a weight")
    if isinstance(start or 0, int) == isinstance(stop or 0, int) and stop is not None and (start or 0) >= stop:
        raise ConfigError(f"the stage {text!r} ends before it begins", fix="write the earlier step first: 1000-2000")
    return MixStage(start or 0, stop, weights)


def _place(text: str) -> int | Fraction:
    if not text.endswith("%"):
        return int(text)
    share = Fraction(text[:-1]) / 100
    if share > 1:
        raise ConfigError(f"a stage at {text} of the run never comes", fix="give a place from 0% to 100%")
    return share


def _amount(name: str, text: str) -> tuple[Kind, Fraction]:
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is no amount of {name}", fix=f"write it as {EXAMPLE}")
    unit = (found[2] or "").lower()
    kind: Kind = "weight" if not unit else "epochs" if unit.startswith("epoch") else "tokens"
    value = Fraction(found[1]) * _UNITS[(found[3] or "").lower()] if found[1][-1].isdigit() or "." in found[1] else 0
    if value <= 0:
        raise ConfigError(
            f"{name} has {kind if kind != 'weight' else 'the weight'} {found[1]}",
            fix="give each source a finite number above 0, or leave it out",
        )
    return kind, Fraction(value)


def _default_name(path: str) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(path).name or "data")[:60]


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"a source of the mix is called {name!r}", fix="use letters, digits, dots, dashes and _ in names"
        )
    return name


def _refuse_doubles(sources: list[MixSource]) -> None:
    paths: dict[str, str] = {}
    names: dict[str, str] = {}
    for each in sources:
        real = os.path.realpath(each.path)
        if real in paths:
            raise ConfigError(
                f"the mix has {each.path} twice, as {paths[real]} and {each.name}", fix="add up its weights in one"
            )
        if each.name in names:
            raise ConfigError(
                f"two sources of the mix are called {each.name}: {names[each.name]} and {each.path}",
                fix=f"give one of them another name: other={each.path}:...",
            )
        paths[real], names[each.name] = each.name, each.path


def mix_text(sources: Iterable[MixSource]) -> str:
    """What `parse_mix` reads back."""
    return ",".join(f"{_prefix(each)}{each.path}:{_number(each.amount)}{_unit(each.kind)}" for each in sources)


def _prefix(source: MixSource) -> str:
    return "" if source.name == _default_name(source.path) and "=" not in source.path else f"{source.name}="


def _unit(kind: Kind) -> str:
    return "" if kind == "weight" else kind


def _number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else repr(float(value))


def with_paths(text: str, change: Callable[[str], str]) -> str:
    """The same mix with other paths, as those of a run that was started in another folder."""
    sources = parse_mix(text)
    return mix_text(MixSource(each.name, change(each.path), each.kind, each.amount) for each in sources)


def same_amounts(one: str, two: str) -> bool:
    """Whether two mixes have the same names and amounts, wherever their folders are; only ratios of weights count."""
    a, b = (_amounts(parse_mix(text)) for text in (one, two))
    return a == b


def _amounts(sources: Iterable[MixSource]) -> dict[str, tuple[Kind, Fraction]]:
    weights = sum(each.amount for each in sources if each.kind == "weight")
    return {each.name: (each.kind, each.amount / (weights if each.kind == "weight" else 1)) for each in sources}


def from_tables(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """The section [data] of a file, with its tables [[data.mix]] and [[data.stage]] as the settings that they are."""
    data = dict(data)
    mix, stages = data.pop("mix", []), data.pop("stage", [])
    for name, tables, known in (("mix", mix, {"name", "path", *KINDS}), ("stage", stages, _STAGE_KEYS)):
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            raise UsageError(f"{path}: data.{name} is no list of tables", fix=f"write each as [[data.{name}]]")
        for table in tables:
            if unknown := sorted(table.keys() - known):
                raise UsageError(
                    f"{path} sets {unknown[0]} in [[data.{name}]], which is not a setting",
                    fix=f"known here: {', '.join(sorted(known))}",
                )
    if mix:
        if "train_data_path" in data:
            raise UsageError(f"{path} sets train_data_path and [[data.mix]]", fix="keep one of them")
        data["train_data_path"] = ",".join(_source_text(table, path) for table in mix)
    if stages:
        if "stages" in data:
            raise UsageError(f"{path} sets stages and [[data.stage]]", fix="keep one of them")
        data["stages"] = [_stage_text(table, path) for table in stages]
    return data


_STAGE_KEYS = {"from_step", "until_step", "from_fraction", "until_fraction", "weights"}


def _source_text(table: dict[str, Any], path: Path) -> str:
    given = [kind for kind in KINDS if kind in table]
    folder = table.get("path")
    if not isinstance(folder, str) or len(given) != 1:
        raise UsageError(
            f"{path}: [[data.mix]] with path {folder!r} has {' and '.join(given) or 'no amount'}",
            fix="give each a path, and one of weight, epochs and tokens",
        )
    value = table[given[0]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{path}: the {given[0]} of {folder} is {value!r}", fix="give a number")
    name = f"{table['name']}=" if "name" in table else f"{_default_name(folder)}=" if "=" in folder else ""
    return f"{name}{folder}:{value!r}{_unit(given[0])}"


def _stage_text(table: dict[str, Any], path: Path) -> str:
    weights = table.get("weights")
    if not isinstance(weights, dict) or not weights:
        raise UsageError(
            f"{path}: a [[data.stage]] has no weights", fix="add a line such as weights = {books = 0.5, code = 0.5}"
        )
    places = []
    for side in ("from", "until"):
        step, share = table.get(f"{side}_step"), table.get(f"{side}_fraction")
        if step is not None and share is not None:
            raise UsageError(f"{path}: a [[data.stage]] has {side}_step and {side}_fraction", fix="keep one of them")
        places.append("" if step is None and share is None else str(step) if share is None else f"{share * 100:g}%")
    return f"{places[0] or 0}-{places[1]} " + ",".join(f"{name}:{weight!r}" for name, weight in weights.items())
