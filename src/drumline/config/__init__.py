"""Flags, TOML files and presets -> one TrainConfig with every setting resolved. No torch here."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.config.facts import ANY, names_with
    from drumline.config.flags import flag
    from drumline.config.mixes import MixSource, MixStage, parse_mix, parse_stages, with_paths
    from drumline.config.model import GPTConfig, ModelSettings
    from drumline.config.options import plugin_options
    from drumline.config.presets import PRESETS, PRETRAINED, RECIPES, filled, gpt_config, preset, with_preset
    from drumline.config.ranges import did_you_mean, refuse_batch, refuse_ranks
    from drumline.config.resolve import resolved
    from drumline.config.resumed import refuse_changes, with_stored_batch
    from drumline.config.settings import (
        LENGTHS,
        OPTIMIZERS,
        RENDEZVOUS_PORT,
        SHORT_PARTS,
        Backend,
        BatchConfig,
        DataConfig,
        DataDtype,
        Device,
        Dtype,
        OnError,
        OnNonfinite,
        OptimConfig,
        RanksConfig,
        RecordConfig,
        RunConfig,
        ScaleLr,
        TrainConfig,
        is_mix,
    )
    from drumline.config.toml_file import check_whole, differences, from_settings, read_settings, whole_numbers
    from drumline.config.toml_text import to_toml

__getattr__, __dir__, __all__ = public(__name__, __file__)
