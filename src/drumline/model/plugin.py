"""A custom model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drumline.config import TrainConfig, plugin_options
from drumline.plugins import check_call, load_plugin


def checked_plugin(config: TrainConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that makes a custom model, and its options, checked against its signature."""
    options = plugin_options(config.model.model_options)
    make = load_plugin(config.model.model)
    check_call(config.model.model, make, "the shape", flag="model_options", options=options)
    return make, options
