"""What the engine understands of a local model, without starting it."""

import msgspec

from backends.torch.model_files import ENGINE_TASKS, ModelError
from backends.torch.prompt_lookup import describe_drafts
from backends.torch.settings import TorchSettings
from protocols.core.catalog import ModelFeatures


def inspect_settings(settings: TorchSettings) -> ModelFeatures | str:
    """What is understood of a local model, or why it can't be read. Imports torch."""
    try:
        from backends.torch.loaded_model import inspect_model  # noqa: PLC0415

        task = ENGINE_TASKS.get(settings.task)
        features = inspect_model(settings.path, task, settings.chat_template, settings.context)
        if features.task is not None:
            return features
        drafts = describe_drafts(settings.prompt_lookup, is_exact=None)
        return msgspec.structs.replace(features, prompt_lookup=drafts)
    except ImportError as error:
        return f"missing dependency ({error}): pip install 'interlingua[torch]'"
    except ModelError as error:
        return str(error)
