"""Recipes: what a preset's recipe fills in, what flags change about it, and that a run's config holds it all."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.app import run_command
from drumline.config.model import ModelSettings, Recipe
from drumline.config.presets import HEAD_LR_WIDTH, PRESETS, RECIPES, gpt_config, with_preset
from drumline.config.settings import OptimConfig, TrainConfig
from drumline.config.toml_file import differences, from_settings, read_settings, sections
from drumline.config.toml_text import to_toml
from drumline.huggingface.families import native_family

OPTIONS: dict[str, Any] = {
    "tie_embeddings": True,
    "init": "gpt2",
    "norm_weights": True,
    "softcap": 0.0,
    "value_tables": 1,
    "smear": False,
    "short_contexts": 0.25,
    "optimizer": "adamw",
    "embedding_lr": 0.01,
    "head_lr": 0.02,
    "schedule": "cosine",
    "warmup_steps": 7,
    "min_lr_ratio": 0.3,
    "decay_fraction": 0.7,
    "weight_decay": 0.2,
    "momentum": 0.5,
    "beta1": 0.6,
    "beta2": 0.7,
    "eps": 1e-5,
    "grad_clip": 3.0,
}
"""Another value for everything that the modern recipe sets."""


def settings(config: TrainConfig) -> dict[str, Any]:
    return {name: value for section in asdict(config).values() for name, value in section.items()}


@pytest.mark.parametrize("recipe", ["classic", "modern", "portable"])
def test_each_recipe_can_be_chosen_for_each_preset_and_modern_ones_have_the_modern_one(recipe: Recipe) -> None:
    for name in PRESETS:
        default = "modern" if name.startswith("modern") else "classic"
        assert with_preset(TrainConfig(model=ModelSettings(preset=name))).model.recipe == default
        resolved = settings(with_preset(TrainConfig(model=ModelSettings(preset=name, recipe=recipe))))
        assert resolved["recipe"] == recipe
        expected = {**RECIPES[recipe], **PRESETS[name].adjusted}
        rate = expected.pop("head_lr", None)  # at one width
        assert {key: resolved[key] for key in expected} == expected and (resolved["head_lr"] is None) == (rate is None)


@pytest.mark.parametrize("name", ["tiny", "modern-tiny"])
def test_the_classic_recipe_is_adamw_with_warmup_and_cosine_and_nothing_added_to_the_block(name: str) -> None:
    config = with_preset(TrainConfig(model=ModelSettings(preset=name, recipe="classic")))
    assert config.optim == OptimConfig(
        lr=2e-3, **{k: v for k, v in RECIPES["classic"].items() if k != "short_contexts"}
    )
    gpt = gpt_config(config.model, vocab_size=64)
    assert gpt.tie_embeddings and gpt.init == "gpt2" and gpt.norm_weights
    assert (gpt.softcap, gpt.value_tables, gpt.smear) == (0.0, 0, False)
    assert gpt.positions == ("rope" if name == "modern-tiny" else "learned")


@pytest.mark.parametrize("name", PRESETS)
def test_the_portable_recipe_is_the_modern_one_with_models_that_have_a_class_in_transformers(name: str) -> None:
    modern, portable = (
        with_preset(TrainConfig(model=ModelSettings(preset=name, recipe=recipe))) for recipe in ("modern", "portable")
    )
    assert portable.optim == modern.optim and portable.batch == modern.batch
    has_class = {"softcap": 0.0, "value_tables": 0, "smear": False, "recipe": "portable"}
    if name.startswith("modern"):  # Qwen3's block; its gate makes the feed-forward layers narrower
        d_ff = PRESETS[name].shape["d_ff"]
        has_class |= {"activation": "swiglu", "d_ff": portable.model.d_ff}
        assert portable.model.d_ff is not None and portable.model.d_ff % 64 == 0
        assert 0 <= portable.model.d_ff - 2 * d_ff / 3 < 64
    assert portable.model == replace(modern.model, **has_class)
    family = native_family(gpt_config(portable.model, vocab_size=64))
    assert family is not None
    kinds = {"modern": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
    assert family.name == kinds.get(name.partition("-")[0], "GPT2LMHeadModel")
    given = with_preset(TrainConfig(model=ModelSettings(preset=name, recipe="portable", d_ff=128))).model
    assert given.d_ff == 128


def test_the_rate_is_that_of_the_optimizer_in_use() -> None:
    def rates(**optim: Any) -> tuple[Any, ...]:
        recipe = optim.pop("recipe", "modern")
        resolved = with_preset(TrainConfig(model=ModelSettings(recipe=recipe), optim=OptimConfig(**optim))).optim
        return resolved.lr, resolved.embedding_lr, resolved.head_lr

    chosen = PRESETS["modern-tiny"]
    modern = {**RECIPES["modern"], **chosen.adjusted}
    own = (modern["embedding_lr"], modern["head_lr"] * (HEAD_LR_WIDTH / chosen.shape["d_model"]))
    assert rates() == (chosen.muon_lr, *own)
    assert rates(optimizer="adamw") == (chosen.lr, *own)
    assert rates(lr=0.5) == (0.5, *own)
    assert rates(recipe="classic") == (chosen.lr, None, None)
    assert rates(recipe="classic", optimizer="muon") == (chosen.muon_lr, chosen.lr, chosen.lr)


@pytest.mark.parametrize(("preset", "d_model"), [("modern-tiny", None), ("modern-medium", None), ("modern", 1536)])
def test_the_heads_rate_is_in_inverse_proportion_to_the_width(preset: str, d_model: int | None) -> None:
    config = with_preset(TrainConfig(model=ModelSettings(preset=preset, d_model=d_model)))
    width = d_model or PRESETS[preset].shape["d_model"]
    assert config.optim.head_lr == pytest.approx(RECIPES["modern"]["head_lr"] * 768 / width)
    given = with_preset(TrainConfig(model=ModelSettings(preset=preset), optim=OptimConfig(head_lr=0.5)))
    assert given.optim.head_lr == 0.5


def test_everything_a_recipe_sets_can_be_set_by_itself_and_is_kept_in_the_config(tmp_path: Path) -> None:
    assert OPTIONS.keys() == RECIPES["modern"].keys()
    modern = TrainConfig(model=ModelSettings(recipe="modern"))
    plain = with_preset(modern)
    for name, value in OPTIONS.items():
        section = next(part for part, names in sections().items() if name in names)
        given = replace(modern, **{section: replace(getattr(modern, section), **{name: value})})
        config = with_preset(given)
        expected = {name} | ({"lr"} if name == "optimizer" else set())
        assert differences(plain, config).keys() == expected
        file = tmp_path / "config.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        assert from_settings(read_settings(file)) == config == with_preset(config)


def test_a_run_keeps_its_recipe_and_refuses_another(
    train: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert train("--recipe", "classic", "--run_dir", "run") == 0
    assert run_command(["train", "--run_dir", "run"]) == 0
    assert run_command(["train", "--run_dir", "run", "--recipe", "modern"]) == 1
    assert "recipe classic -> modern" in capsys.readouterr().err


def test_dry_run_counts_the_weights_and_state_of_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    def parameters(*flags: str) -> int:
        assert run_command(["train", "--dry_run", "--device", "cpu", "--recipe", "modern", *flags]) == 0
        (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("parameters "))
        return int(line.split()[1].replace(",", ""))

    modern, table = parameters(), 2048 * 192
    assert parameters("--value_tables", "0") == modern - 2 * table
    assert parameters("--tie_embeddings") == modern - table
    assert parameters("--no-smear") == modern - 192
    assert parameters("--norm_weights") == modern + 3 * (2 * 192 + 2 * 48) + 192
    untied = ("--value_tables", "0", "--tie_embeddings", "--norm_weights")
    assert parameters(*untied) == modern - 3 * table + 3 * (2 * 192 + 2 * 48) + 192
