"""Flags, TOML files and presets -> one TrainConfig with every setting resolved. No torch here."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.config.presets import PRESETS, RECIPES, filled, gpt_config, preset, with_preset
    from drumline.config.settings import (
        MEETING_PORT,
        Backend,
        BatchConfig,
        DataConfig,
        Device,
        Dtype,
        GPTConfig,
        ModelSettings,
        OnError,
        OnNonfinite,
        OptimConfig,
        RanksConfig,
        RecordConfig,
        RunConfig,
        TrainConfig,
    )
    from drumline.config.toml_file import differences, from_settings, read_settings, sections, to_toml

__getattr__, __dir__, __all__ = public(__name__, __file__)
