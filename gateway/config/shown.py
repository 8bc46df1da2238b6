"""A configuration as plain values: what may be shown, with ``***`` for secrets."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from gateway.config.rates import RateValue, format_rate
from gateway.config.units import Secret


def dump_config(value: Any) -> Any:
    """Dictionaries, lists and scalars, in the order of the fields; durations in seconds."""
    match value:
        case Secret():
            return "***"
        case Struct():
            config = value.__struct_config__
            tag = {config.tag_field: config.tag} if config.tag_field else {}
            return tag | {
                name: dump_config(getattr(value, name)) for name in value.__struct_fields__
            }
        case Mapping():
            return {key: dump_config(one) for key, one in value.items()}
        case RateValue():
            return format_rate(value)
        case tuple():
            return [dump_config(one) for one in value]
        case _:
            return value
