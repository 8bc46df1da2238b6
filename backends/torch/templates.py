"""A chat template of one's own, in the place of the model's."""

from pathlib import Path
from typing import Any

import msgspec

from backends.torch.models import ModelError


def load_template(path: str) -> str | dict[str, str]:
    """The template in a file or in a tokenizer's folder, or the folder's several, by name.

    Raises ModelError when there is none.
    """
    place = Path(path)
    try:
        if place.is_file():
            return place.read_text("utf-8")
        apart = place / "chat_template.jinja"
        if apart.is_file():
            return apart.read_text("utf-8")
        described = msgspec.json.decode((place / "tokenizer_config.json").read_bytes())
        return _read_templates(described["chat_template"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(f"there is no chat template in {path}: {error}") from error


def _read_templates(found: Any) -> str | dict[str, str]:
    """As tokenizer_config.json has them: one, or a list of named ones."""
    if isinstance(found, list):
        return {str(one["name"]): str(one["template"]) for one in found}
    return str(found)
