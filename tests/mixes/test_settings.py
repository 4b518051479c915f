"""A mix as text and as tables: what is read, what is written back, and what is refused with two lines."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import TrainConfig, differences, from_settings, is_mix, read_settings, to_toml
from drumline.config.mixes import KINDS, MixSource, mix_text, parse_mix, parse_stages, same_amounts
from drumline.errors import ConfigError, UsageError


def of(text: str, **more: object) -> TrainConfig:
    return from_settings({"train_data_path": text, **more})


@pytest.mark.parametrize("text", ["books:0.7,code:0.3", "a:1", "x=/data/a,b:2:3", "a:2epochs,b:500Mtokens", "a:x,b:.5"])
def test_several_folders_with_amounts_are_a_mix(text: str) -> None:
    assert is_mix(text)


@pytest.mark.parametrize(
    "text", ["builtin", "books", "my_module:texts", "books/*.txt", "owner/name", "12:30.txt", "a,b"]
)
def test_other_data_are_no_mix(text: str) -> None:
    assert not is_mix(text)


def test_a_path_that_exists_is_no_mix_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "notes 12:30"
    path.write_text("text")
    assert not is_mix(str(path)) and is_mix(f"{path}0")


def test_units_names_and_paths_are_read() -> None:
    found = parse_mix("code:500Mtokens,web=/data/web,2024:2.5,books:1epoch")
    assert found == (
        MixSource("books", "books", "epochs", Fraction(1)),
        MixSource("code", "code", "tokens", Fraction(500_000_000)),
        MixSource("web", "/data/web,2024", "weight", Fraction(5, 2)),
    )


names = st.text("abcdefgh-_.0123456789", min_size=1, max_size=8).filter(lambda name: name.strip(".") != "")


@given(
    st.lists(
        st.tuples(names, names, st.sampled_from(KINDS), st.integers(1, 10**9)),
        min_size=1,
        max_size=5,
        unique_by=(lambda each: each[0], lambda each: each[1]),
    )
)
def test_what_is_written_is_read_back(parts: list[tuple[str, str, str, int]]) -> None:
    sources = tuple(
        MixSource(name, f"/no-such-folder/{path}", kind, Fraction(amount))  # type: ignore[arg-type]
        for name, path, kind, amount in sorted(parts)
    )
    assert parse_mix(mix_text(sources)) == sources


def test_a_run_reads_its_own_config_back(tmp_path: Path) -> None:
    config = of("books:0.7,code:0.3", stages=["10-20 books:1", "80%- code:1"])
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert from_settings(read_settings(path)) == config


def test_tables_are_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("""
[[data.mix]]
path = "data/books"
weight = 0.7
[[data.mix]]
name = "code"
path = "data/python"
weight = 0.3
[[data.stage]]
from_step = 1000
until_fraction = 0.5
weights = {books = 1}
[data]
document_mask = true
""")
    settings = read_settings(path)
    assert settings["document_mask"] is True
    assert settings["train_data_path"] == "data/books:0.7,code=data/python:0.3"
    assert settings["stages"] == ["1000-50% books:1"]
    assert [each.name for each in parse_mix(settings["train_data_path"])] == ["books", "code"]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ('[[data.mix]]\npath = "a"', "has no amount"),
        ('[[data.mix]]\npath = "a"\nweight = 1\nepochs = 2', "weight and epochs"),
        ("[[data.mix]]\nweight = 1", "path None"),
        ('[[data.mix]]\npath = "a"\nweight = "1"', "weight of a is '1'"),
        ('[[data.mix]]\npath = "a"\nwieght = 1', "sets wieght"),
        ('[data]\nmix = "a"', "no list of tables"),
        ("[[data.stage]]\nfrom_step = 1", "no weights"),
        ("[[data.stage]]\nfrom_step = 1\nfrom_fraction = 0.5\nweights = {a = 1}", "from_step and from_fraction"),
        ('[data]\ntrain_data_path = "a"\n[[data.mix]]\npath = "a"\nweight = 1', "train_data_path and"),
    ],
)
def test_tables_that_say_too_little_or_too_much_are_refused(tmp_path: Path, table: str, problem: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(table)
    with pytest.raises(UsageError, match=problem.replace("[", r"\[")):
        read_settings(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:0,b:1", "a has the weight 0"),
        ("a:-1,b:1", "a has the weight -1"),
        ("b:1,a:nan", "a has the weight nan"),
        ("b:1,a:inf", "a has the weight inf"),
        ("b:1,a:0epochs", "a has epochs 0"),
        ("b:1,a:1e999999", "no amount of a"),
        ("b:1,a:3steps", "no amount of a"),
        ("b:1,a", "without an amount"),
        (":1", "without an amount"),
        ("a:1,a:2", "a twice"),
        ("x/a:1,y/a:2", "two sources of the mix are called a"),
    ],
)
def test_amounts_that_make_no_sense_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_mix(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:1", "does not say from which step"),
        ("5-3 a:1", "ends before it begins"),
        ("1-3 c:1", "no source of the mix"),
        ("1-3 a:1,a:2", "twice"),
        ("1-3 a:2epochs", "epochs of a"),
        ("120%- a:1", "never comes"),
    ],
)
def test_stages_that_make_no_sense_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_stages([text], ["a", "b"])


def test_paths_may_change_when_a_run_is_resumed_and_weights_may_not() -> None:
    stored = of("books:0.7,code:0.3")
    assert not differences(stored, of("code=/other/code:3,/other/books:7"))
    assert differences(stored, of("books:0.5,code:0.5")).keys() == {"train_data_path"}
    assert differences(stored, of("books")).keys() == {"train_data_path"}
    assert differences(stored, of("books:0.7,code:0.3", stages=["5- code:1"])).keys() == {"stages"}
    assert not differences(of("books"), of("elsewhere"))
    assert same_amounts("a:1,b:2epochs", "b:2epochs,a:9") and not same_amounts("a:1,b:2epochs", "b:3epochs,a:1")
