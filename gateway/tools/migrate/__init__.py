"""Configurations of other gateways, carried over to this one's: all that can be, and no silence.

``source`` is the other's file, and ``reading`` its single values. ``members`` reads the entries of
its list of models, of which ``places`` finds the workers by the names in ``origins``; ``groups``
makes backends and models of them. ``settings`` reads what is said of them all, and ``writing``
writes the new file.
"""

from gateway.tools.migrate.litellm import Migrated, migrate
from gateway.tools.migrate.source import Note

__all__ = ["Migrated", "Note", "migrate"]
