"""Settings: presets fill what is open, TOML gives back what was written, mistakes get a fix."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.cli.app import run_command
from drumline.config.facts import names_with
from drumline.config.model import GPTConfig, GPTOptions, ModelSettings
from drumline.config.options import plugin_options
from drumline.config.presets import PRESETS, gpt_config, with_preset
from drumline.config.resolve import resolved
from drumline.config.resumed import refuse_changes, with_stored_batch
from drumline.config.settings import BatchConfig, DataConfig, OptimConfig, RunConfig, TrainConfig
from drumline.config.toml_file import differences, from_settings, read_settings, sections
from drumline.config.toml_text import to_toml
from drumline.errors import ConfigError, UsageError
from drumline.optim import state_size
from drumline.parallel.agreement import settings as agreed_settings


def test_no_two_sections_share_a_settings_name() -> None:
    names = [name for section in sections().values() for name in section]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_every_open_setting_of_the_model(name: str) -> None:
    config = with_preset(TrainConfig(model=ModelSettings(preset=name)))
    open_settings = [f.name for f in fields(config.model) if getattr(config.model, f.name) is None]
    assert not {*open_settings} - {"init_from", "n_kv_heads", "head_dim", "rope_theta", "norm_eps"}
    assert config.optim.lr and config.data.vocab_size and (config.batch.total_steps or config.batch.epochs)


def test_gpt2_presets_have_the_published_shapes() -> None:
    def shape(name: str) -> tuple[int, int, int, int]:
        gpt = gpt_config(with_preset(TrainConfig(model=ModelSettings(preset=name))).model, vocab_size=50257)
        return gpt.n_layers, gpt.n_heads, gpt.d_model, gpt.max_position_embeddings

    assert shape("gpt2") == shape("modern") == (12, 12, 768, 1024)
    assert shape("gpt2-medium") == shape("modern-medium") == (24, 16, 1024, 1024)
    assert shape("gpt2-large") == shape("modern-large") == (36, 20, 1280, 1024)
    assert shape("gpt2-xl") == shape("modern-xl") == (48, 25, 1600, 1024)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-1b", 1_235_814_400), ("llama-3b", 3_212_749_824), ("llama-8b", 8_030_261_248)],
)
def test_llama_presets_have_as_many_parameters_as_the_public_models(name: str, parameters: int) -> None:
    config = with_preset(TrainConfig(model=ModelSettings(preset=name)))
    assert state_size(config, vocab_size=config.data.vocab_size or 0).parameters == parameters


def test_a_setting_given_by_the_user_beats_the_preset() -> None:
    config = with_preset(TrainConfig(model=ModelSettings(n_layers=7, qk_norm=False, preset="modern-tiny")))
    assert config.model.n_layers == 7 and config.model.qk_norm is False and config.model.positions == "rope"


def test_an_unknown_preset_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="there is no preset 'gpt2-medum'") as raised:
        with_preset(TrainConfig(model=ModelSettings(preset="gpt2-medum")))
    assert "did you mean --preset gpt2-medium?" in raised.value.fix


@given(
    path=st.text(max_size=30),
    lr=st.floats(min_value=1e-12, max_value=1e3),
    seed=st.integers(0, 2**63 - 1),
    allow=st.lists(st.text(max_size=5), max_size=3),
)
def test_a_config_written_as_toml_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, path: str, lr: float, seed: int, allow: list[str]
) -> None:
    config = TrainConfig(
        data=DataConfig(train_data_path=path),
        optim=OptimConfig(lr=lr),
        run=RunConfig(seed=seed, allow_change=tuple(allow)),
    )
    file = tmp_path_factory.mktemp("toml") / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert from_settings(read_settings(file)) == config


def test_a_setting_may_stand_in_its_section_or_at_the_top(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "gpt2"\n[optim]\nlr = 1e-3\n')
    assert read_settings(file) == {"preset": "gpt2", "lr": 1e-3}


@pytest.mark.parametrize(
    ("text", "error", "fix"),
    [
        ("[optim]\nlrr = 1\n", "lrr", "did you mean lr?"),
        ("bach_size = 3\n", "bach_size", "did you mean batch_size?"),
        ("[optm]\nlr = 1\n", r"\[optm\]", "did you mean optim?"),
        ("[optim]\nbatch_size = 1\n", "batch_size", "move it to [batch]"),
    ],
)
def test_an_unknown_key_in_a_config_file_is_named_with_the_nearest_one(
    tmp_path: Path, text: str, error: str, fix: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=error) as raised:
        read_settings(file)
    assert fix in raised.value.fix and str(file) in raised.value.problem


def test_a_config_file_that_is_missing_or_broken_is_an_error_for_people(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml"):
        read_settings(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("lr = = 3\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML"):
        read_settings(tmp_path / "bad.toml")


def test_differences_are_those_that_change_what_a_step_computes() -> None:
    old = with_preset(TrainConfig())
    new = replace(old, run=replace(old.run, save_every=7, seed=3), optim=replace(old.optim, lr=1.0))
    assert differences(old, new) == {"lr": (old.optim.lr, 1.0), "seed": (0, 3)}


@pytest.mark.parametrize(
    "shape",
    [
        {"d_model": 100, "n_heads": 12},
        {"n_heads": 12, "n_kv_heads": 5},
        {"n_layers": 0},
        {"dropout": 1.0},
        {"d_model": 36, "n_heads": 12, "positions": "rope"},
    ],
)
def test_an_impossible_shape_is_refused_with_a_fix(shape: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as raised:
        GPTConfig(**shape)  # type: ignore[arg-type]
    assert "--" in raised.value.fix


@dataclass(frozen=True, kw_only=True)
class LaterRunConfig(RunConfig):
    """RunConfig with a setting that says nothing about itself."""

    later: int = 0


def test_a_setting_declared_without_facts_is_refused_on_resume_and_compared_between_ranks() -> None:
    old, new = (TrainConfig(run=LaterRunConfig(later=value)) for value in (0, 1))
    assert differences(old, new) == {"later": (0, 1)}
    assert agreed_settings(new)["later"] == 1


def test_a_setting_that_may_change_or_differ_by_host_is_declared_so() -> None:
    old = TrainConfig()
    new = TrainConfig(run=RunConfig(run_dir="other", save_every=3, device="cpu"), optim=OptimConfig(lr=1.0))
    assert differences(old, new) == {"lr": (None, 1.0)}
    compared = agreed_settings(new)
    assert "run_dir" not in compared and "device" not in compared and compared["save_every"] == 3
    assert "seed" not in names_with("may_change") | names_with("per_host")


def test_a_model_option_is_a_setting_with_its_type_open_until_the_preset_fills_it() -> None:
    hints, open_hints = get_type_hints(GPTOptions), get_type_hints(ModelSettings)
    for option in fields(GPTOptions):
        assert getattr(ModelSettings(), option.name) is None
        assert open_hints[option.name] == hints[option.name] | None
    assert list(open_hints).index("preset") >= 0 and fields(ModelSettings)[0].name == "preset"


@pytest.mark.parametrize("lengths", [{"total_steps": 3, "minutes": 1.0}, {"epochs": 1.0, "minutes": 1.0}])
def test_the_length_of_a_run_is_given_once(lengths: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="both set the length of the run"):
        BatchConfig(**lengths)  # type: ignore[arg-type]


def test_minutes_take_the_place_of_the_presets_length() -> None:
    batch = with_preset(TrainConfig(batch=BatchConfig(minutes=2.5))).batch
    assert (batch.total_steps, batch.epochs, batch.minutes) == (None, None, 2.5)
    with pytest.raises(ConfigError, match="minutes is 0"):
        BatchConfig(minutes=0)


def test_an_optimizer_is_a_built_in_one_or_a_plugin() -> None:
    assert OptimConfig(optimizer="my_optim:lion").optimizer == "my_optim:lion"
    with pytest.raises(ConfigError, match="there is no optimizer 'adam'") as raised:
        OptimConfig(optimizer="adam")
    assert raised.value.fix == "did you mean adamw?"
    with pytest.raises(ConfigError) as raised:
        OptimConfig(optimizer="sophia")
    assert "adamw, muon, or package.module:name" in raised.value.fix


def test_a_resumed_run_keeps_the_sequences_per_step_on_any_number_of_ranks() -> None:
    stored = BatchConfig(batch_size=4, global_batch_size=16)
    kept = with_stored_batch(BatchConfig(gradient_accumulation_steps=3), stored)
    assert kept == BatchConfig(batch_size=4, global_batch_size=16)
    assert with_stored_batch(BatchConfig(batch_size=2), stored) == BatchConfig(batch_size=2, global_batch_size=16)
    other = BatchConfig(global_batch_size=32)
    assert with_stored_batch(other, stored) == other


def test_changes_are_refused_by_name_unless_they_are_allowed() -> None:
    stored = resolved(TrainConfig())
    changed = replace(stored, run=replace(stored.run, seed=3, save_every=9))
    with pytest.raises(ConfigError, match=r"runs/a was started with different settings: seed 0 -> 3\n") as raised:
        refuse_changes(changed, stored, run_dir=Path("runs/a"))
    assert "--allow_change seed" in raised.value.fix
    refuse_changes(replace(changed, run=replace(changed.run, allow_change=("seed",))), stored, run_dir=Path("runs/a"))


def test_resolving_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="context of 130 tokens cannot be split"):
        resolved(TrainConfig(model=ModelSettings(context=130), batch=BatchConfig(short_contexts=0.5)))
    with pytest.raises(ConfigError, match="--allow_change learning_rate") as raised:
        resolved(TrainConfig(run=RunConfig(allow_change=("learning_rate",))))
    assert "use the name of a flag" in raised.value.fix


def test_model_options_are_toml_values_and_a_table_of_their_own_in_a_config_file(tmp_path: Path) -> None:
    words = ("width=3", "name=wide net", "rates=[0.5, 1]", "tied = true", 'path="a=b"', "width=4")
    config = TrainConfig(model=ModelSettings(model="my_models:net", model_options=words))
    assert plugin_options(config.model.model_options) == {
        "name": "wide net",
        "path": "a=b",
        "rates": [0.5, 1],
        "tied": True,
        "width": 4,
    }
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert '[model_options]\nname = "wide net"\npath = "a=b"\n' in file.read_text()
    assert from_settings(read_settings(file)) == config
    other = replace(config, model=replace(config.model, model_options=("width=5",)))
    assert differences(config, other).keys() == {"model_options"} <= agreed_settings(config).keys()


def test_model_options_without_a_model_of_your_own_or_a_value_are_refused() -> None:
    with pytest.raises(ConfigError, match="not for --model gpt"):
        ModelSettings(model_options=("width=3",))
    with pytest.raises(ConfigError, match="'width' is not of the form key=value"):
        ModelSettings(model="my_models:net", model_options=("width",))


def test_a_setting_that_a_file_sets_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("lr = 0.1\n[optim]\nlr = 0.2\n")
    with pytest.raises(ConfigError, match=r"sets lr twice, to 0\.1 and to 0\.2"):
        read_settings(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        ("--lr -1", "give --lr a value above 0"),
        ("--lr nan", "give --lr a finite value above 0"),
        ("--minutes 0", "give --minutes a value above 0"),
        ("--minutes inf", "give --minutes a finite value above 0"),
        ("--beta2 1", "give --beta2 a value from 0 to less than 1"),
        ("--weight_decay -1", "give --weight_decay a value of 0 or more"),
        ("--nnodes 4:2", "give --nnodes a value like 2, or a range like 1:4"),
    ],
)
def test_a_value_out_of_range_is_answered_with_the_range(
    flags: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", "--dry_run", *flags.split()]) == 1
    assert f"fix: {fix}\n" in capsys.readouterr().err
