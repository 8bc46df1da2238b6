"""Rewrite the configuration of another gateway as one of this gateway, and note all that changes.

litellm     the entry point, the list of models, and the settings
providers   LiteLLM's providers and their endpoints
yaml_file   reading the old file and writing the new one
"""

from gateway.tools.migrate.litellm import Migration, migrate
from gateway.tools.migrate.yaml_file import Note

__all__ = ["Migration", "Note", "migrate"]
