"""Causal language models of transformers, from a config: a table, a `config.json`, or a folder of `from_pretrained`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.utils.names import count_of, suggestion

if TYPE_CHECKING:
    from torch import nn


class ConfigError(UsageError):
    """A table has keys that its config does not have. The message has a line for each."""

    listed = True


def config_of(
    option: str, given: str | Path | Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Any:
    """The config of a file or folder, or of a table with its `model_type`.

    option: where it was given, for messages. defaults: values that a table need not give, for the keys that its config has.
    Raises UsageError: transformers is missing, or the config is not valid.
    """
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"{option} {given} needs transformers; pip install 'meshwright[demo]'") from error
    # it warns about every config that names no loss
    transformers.logging.set_verbosity_error()
    if isinstance(given, Mapping):
        return _of_table(option, given, defaults or {})
    try:
        # without it transformers asks on the terminal whether to run code of the folder
        return transformers.AutoConfig.from_pretrained(given, trust_remote_code=False)
    # transformers raises many kinds of errors for a bad config
    except Exception as error:
        text = f"{option} {given} is no transformers config ({_first_line(error)}); give its config.json"
        raise UsageError(text) from error


def _of_table(option: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    settings = dict(given)
    name = settings.pop("model_type")
    if name not in CONFIG_MAPPING:
        text = f"{option}.model_type {name!r} is not one of transformers'{suggestion(name, CONFIG_MAPPING)}"
        raise UsageError(text)
    kind = CONFIG_MAPPING[name]
    keys = {*inspect.signature(kind.__init__).parameters, *kind.attribute_map, "attn_implementation"}
    # transformers keeps any other key without a word
    wrong = [f"{option}.{key} is no key of it{suggestion(key, keys)}" for key in settings if key not in keys]
    if wrong:
        head = f"{option}: {count_of(len(wrong), 'error')} in the {kind.__name__} of transformers"
        raise ConfigError("\n  ".join([head, *wrong]))
    try:
        return kind(**{**{key: value for key, value in defaults.items() if key in keys}, **settings})
    except Exception as error:
        raise UsageError(
            f"{option}: {kind.__name__} refuses it ({_first_line(error)}); correct it"
        ) from error


def model_of(option: str, config: Any, **settings: Any) -> nn.Module:
    """A new model with this config. Raises UsageError where transformers has none, or cannot build it."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **settings)
    except Exception as error:
        raise UsageError(
            f"{option}: transformers cannot build it ({_first_line(error)}); check its config"
        ) from error


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
