"""Flags, TOML files and presets -> one TrainConfig with every setting resolved. No torch here."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.config.presets import PRESETS as PRESETS
    from drumline.config.presets import RECIPES as RECIPES
    from drumline.config.presets import filled as filled
    from drumline.config.presets import gpt_config as gpt_config
    from drumline.config.presets import preset as preset
    from drumline.config.presets import with_preset as with_preset
    from drumline.config.settings import MEETING_PORT as MEETING_PORT
    from drumline.config.settings import Backend as Backend
    from drumline.config.settings import BatchConfig as BatchConfig
    from drumline.config.settings import DataConfig as DataConfig
    from drumline.config.settings import Device as Device
    from drumline.config.settings import Dtype as Dtype
    from drumline.config.settings import GPTConfig as GPTConfig
    from drumline.config.settings import ModelSettings as ModelSettings
    from drumline.config.settings import OnError as OnError
    from drumline.config.settings import OnNonfinite as OnNonfinite
    from drumline.config.settings import OptimConfig as OptimConfig
    from drumline.config.settings import RanksConfig as RanksConfig
    from drumline.config.settings import RecordConfig as RecordConfig
    from drumline.config.settings import RunConfig as RunConfig
    from drumline.config.settings import TrainConfig as TrainConfig
    from drumline.config.toml_file import differences as differences
    from drumline.config.toml_file import from_settings as from_settings
    from drumline.config.toml_file import read_settings as read_settings
    from drumline.config.toml_file import sections as sections
    from drumline.config.toml_file import to_toml as to_toml

__getattr__, __dir__, __all__ = public(__name__, __file__)
