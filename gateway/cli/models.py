"""``interlingua models``: what the local engine understands of a model."""

import os
from pathlib import Path

import click
import msgspec

from backends.torch.model_features import inspect_settings
from backends.torch.settings import TorchSettings
from gateway.config.errors import ConfigError
from gateway.config.loader import load_bytes
from gateway.config.schema import Config
from gateway.terminal import print_text
from protocols.core.catalog import ModelFeatures


@click.group()
def models() -> None:
    """Show models of the configuration."""


@models.command()
@click.argument("file", type=click.Path())
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def show(file: str, name: str, *, as_json: bool) -> None:
    """Show what the local engine understands of the model NAME of the configuration FILE.

    NAME is a model's public name, or a backend's. Its tokenizer and chat template are read, not its
    weights: chat, the format of tool calls and when it is enforced, the marks of reasoning, whether
    schemas are enforced, the context, and the architecture, number and type of its weights. Of a
    model that generates no text, its task.

    Exit codes: 0 understood, 1 its tool calls are not understood, 2 wrong usage or no local model.
    """
    try:
        config = load_bytes(Path(file).read_bytes(), file, env=os.environ).config
    except OSError as error:
        raise click.UsageError(f"{file} can't be read: {error.strerror}") from None
    except ConfigError as error:
        raise click.UsageError(f"{file} is wrong: interlingua check {file}") from error
    for key, settings in find_local_models(config, name, file).items():
        features = inspect_local_model(settings)
        if as_json:
            print_text(msgspec.json.encode({"backend": key, **msgspec.to_builtins(features)}))
        else:
            print_features(key, settings, features)
        if features.task is None and features.tool_calls is None:
            raise SystemExit(1)


def print_features(key: str, settings: TorchSettings, features: ModelFeatures) -> None:
    """Print what is understood of the model of a backend."""
    print_text(f"{key}: {settings.path}")
    for subject, text in features.describe():
        print_text(f"  {subject}: {text}")


def find_local_models(config: Config, name: str, file: str) -> dict[str, TorchSettings]:
    """The local backends of a model, by name. Raises UsageError if there is none."""
    targets = config.models[name].resolve_targets().values() if name in config.models else ()
    wanted = {one.backend for one in targets} or {name}
    found = {
        key: backend
        for key, backend in config.backends.items()
        if key in wanted and isinstance(backend, TorchSettings)
    }
    if not found:
        raise click.UsageError(f"{name!r} is no model or backend of {file} with a local model")
    return found


def inspect_local_model(settings: TorchSettings) -> ModelFeatures:
    """What is understood of a local model. Raises UsageError if it can't be read."""
    features = inspect_settings(settings)
    if isinstance(features, str):
        raise click.UsageError(features)
    return features
