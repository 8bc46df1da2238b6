"""The reference pages, made from what the gateway runs on, so that they can't be wrong.

dialects       what each dialect reads: its tables, profile by profile
carrying       which field of the internal request each worker carries
errors         what goes wrong, and how each dialect tells it
configuration  every field that the file may hold
metrics        what the admin listener's page tells
commands       how the command is called
markdown       the bits of Markdown that these are written in

Pure: what the pages tell of is passed in.
"""

from collections.abc import Mapping, Sequence

import click

from gateway.reference import carrying, commands, configuration, dialects, errors, metrics
from gateway.reference.carrying import Carrier
from gateway.reference.dialects import Spoken
from gateway.told import Told

__all__ = ["Carrier", "Spoken", "pages"]


def pages(
    spoken: Sequence[Spoken],
    carriers: Mapping[str, Carrier],
    measured: Mapping[str, Sequence[Told]],
    command: click.Command,
) -> Mapping[str, str]:
    """Every page by its file's name.

    ``carriers``: whatever answers requests, by name. ``measured``: the metrics, by part.
    """
    return {
        "dialects.md": dialects.page(spoken) + "\n" + carrying.section(spoken, carriers),
        "errors.md": errors.page(spoken),
        "configuration.md": configuration.page(),
        "metrics.md": metrics.page(measured),
        "commands.md": commands.page(command),
    }
