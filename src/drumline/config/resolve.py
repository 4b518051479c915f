"""The config of a run with every setting resolved. No torch here."""

from __future__ import annotations

from drumline.config.presets import gpt_config, with_preset
from drumline.config.settings import SHORT_PARTS, TrainConfig
from drumline.errors import ConfigError


def resolved(config: TrainConfig) -> TrainConfig:
    """The config with the preset's values; refuses what cannot work with any data or device."""
    config = with_preset(config)
    gpt_config(config.model, vocab_size=1)
    context = config.model.context or 0
    if config.batch.short_contexts and context % SHORT_PARTS:
        raise ConfigError(
            f"a context of {context} tokens cannot be split into {SHORT_PARTS} short ones",
            fix=f"choose --context as a multiple of {SHORT_PARTS}, or use --short_contexts 0",
        )
    if config.run.allow_change:
        from drumline.config.resumed import check_allowed

        check_allowed(config.run.allow_change)
    return config
