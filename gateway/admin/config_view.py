"""The configuration as its author wrote it, with masked secrets, beside its file's present text."""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache, lru_cache
from typing import Any, Final

import yaml
from msgspec import Struct
from msgspec import inspect as types

from gateway.config import schema
from gateway.config.descriptions import list_inner_types, list_sections
from gateway.config.errors import ConfigError, IssueCollector
from gateway.config.file_watch import read_file_state
from gateway.config.loader import read_file
from gateway.config.yaml_reader import compose_yaml, decode_utf8
from protocols.core.units import RateValue, Secret, format_rate

_HASH_LENGTH: Final = 12
"""Digits of a configuration hash."""
_MASK: Final = '"***"'
"""In quotes it is a text in YAML, too."""
_MASKED_FIELDS: Final = frozenset({"auth", "sha256", "watermark"})
"""Fields that are masked although they are no secrets, or only a part of them is."""
_MAX_SIZE: Final = 1 << 20
"""Bytes of a larger file are not shown."""
_MAX_COMPARISONS: Final = 25_000_000
"""Pairs of lines: two texts of 5,000 lines."""
_MIN_SECRET_LENGTH: Final = 4
"""A shorter secret is masked where its field stands, and not wherever its text occurs."""
_REFERENCE: Final = re.compile(r"""["']?\$\{\w+\}["']?""")
"""A variable of the environment alone: its name is no secret, but its default might be."""
_URL_PASSWORD: Final = re.compile(r"(?<=://)[^\s/@]+(?=@)")


class ConfigLine(Struct, frozen=True, array_like=True):
    """A line of a configuration, with its number in effect and in the file, where it is there."""

    active: int | None
    file: int | None
    text: str


async def describe_config(
    config: schema.Config, digest: str, filename: str, data: bytes = b""
) -> Mapping[str, Any]:
    """The configuration with masked secrets, and the state of its file.

    ``data`` is the text that the configuration was loaded from.
    """
    state = await asyncio.to_thread(read_file_state, filename)
    file_hash = None if state is None else state.digest.hex()[:_HASH_LENGTH]
    differs = file_hash not in (None, digest)
    return {
        "hash": digest,
        "file": {"name": filename, "hash": file_hash, "differs": differs},
        "config": _mask_fields(dump_config(config)),
        "lines": await asyncio.to_thread(
            _list_lines, data, filename if differs else None, (*_find_secrets(config),)
        ),
    }


def _list_lines(
    data: bytes, filename: str | None, secrets: tuple[str, ...]
) -> Sequence[ConfigLine] | None:
    """The lines in effect, and those of the file if one is given; None if a text can't be shown."""
    try:
        active = mask_yaml(data, secrets).splitlines()
        if filename is None:
            return [ConfigLine(n, n, line) for n, line in enumerate(active, 1)]
        return compare_lines(active, mask_yaml(read_file(filename), secrets).splitlines())
    except ConfigError:
        return None


def compare_lines(active: Sequence[str], file: Sequence[str]) -> Sequence[ConfigLine]:
    """All lines of two texts, each once; a changed line is in the list as it was and as it is.

    Of long texts that differ every line is taken for changed, since comparing them takes long.
    """
    lines = list[ConfigLine]()
    if len(active) * len(file) > _MAX_COMPARISONS and active != file:
        lines += [ConfigLine(n, None, line) for n, line in enumerate(active, 1)]
        return [*lines, *(ConfigLine(None, n, line) for n, line in enumerate(file, 1))]
    for tag, i, i_end, j, j_end in SequenceMatcher(None, active, file).get_opcodes():
        if tag == "equal":
            lines += [ConfigLine(n + 1, n + 1 - i + j, active[n]) for n in range(i, i_end)]
        else:
            lines += [ConfigLine(n + 1, None, active[n]) for n in range(i, i_end)]
            lines += [ConfigLine(None, n + 1, file[n]) for n in range(j, j_end)]
    return lines


@lru_cache(maxsize=2)  # the text in effect and that of the file are asked for every second
def mask_yaml(data: bytes, secrets: tuple[str, ...] = ()) -> str:
    """The text with secrets masked, whatever else may be wrong with it.

    Masked are the values of fields for secrets, also in comments and by way of aliases; passwords
    in URLs; and ``secrets`` wherever they occur. Raises ConfigError if the text is too large or
    can't be parsed.
    """
    issues = IssueCollector("")
    if len(data) > _MAX_SIZE:
        raise ConfigError("", issues.issues)
    text = decode_utf8(data, "")
    parts, end = list[str](), 0
    for start, stop in sorted(_find_secret_spans(compose_yaml(text, issues))):
        if start < end:  # an alias of a value that is masked already
            continue
        value = text[start:stop]
        is_reference = _REFERENCE.fullmatch(value.strip())
        parts += [
            _mask_comments(text[end:start]),
            value if is_reference else _MASK + "\n" * value.count("\n"),
        ]
        end = stop
    masked = _URL_PASSWORD.sub("***", "".join([*parts, _mask_comments(text[end:])]))
    for secret in secrets:
        masked = masked.replace(secret, "***")
    return masked


def _mask_comments(text: str) -> str:
    """Mask what looks like a secret field in a comment. Values that are no secrets may suffer."""
    return _get_comment_pattern().sub(rf"\1 {_MASK}", text)


def _find_secret_spans(root: yaml.Node) -> Iterator[tuple[int, int]]:
    """Where the values of fields for secrets begin and end. The tree has no cycles."""
    seen = set[tuple[int, bool]]()
    waiting: list[tuple[yaml.Node, bool]] = [(root, False)]
    while waiting:
        node, is_secret = waiting.pop()
        if (id(node), is_secret) in seen:
            continue
        seen.add((id(node), is_secret))
        match node:
            case yaml.MappingNode():
                for key, value in node.value:
                    name = key.value if isinstance(key, yaml.ScalarNode) else ""
                    waiting.append((value, is_secret or name in list_secret_fields()))
            case yaml.SequenceNode():
                waiting.extend((value, is_secret) for value in node.value)
            case _ if is_secret and node.start_mark is not None:
                yield node.start_mark.index, node.end_mark.index
            case _:
                continue


@cache
def list_secret_fields() -> frozenset[str]:
    """The names of the fields whose values are masked in a text."""
    return _MASKED_FIELDS | {
        field.name
        for section in list_sections()
        for field in section.fields
        if _has_secret(field.type)
    }


def _has_secret(kind: types.Type) -> bool:
    if isinstance(kind, types.CustomType):
        return issubclass(kind.cls, Secret)
    return not isinstance(kind, types.StructType) and any(map(_has_secret, list_inner_types(kind)))


@cache
def _get_comment_pattern() -> re.Pattern[str]:
    names = "|".join(map(re.escape, sorted(list_secret_fields())))
    return re.compile(rf"(?m)(#.*?\b(?:{names})\b[\"']?\s*:)[^\n]+")


def _find_secrets(value: Any) -> Iterator[str]:
    """The secrets of a configuration, as they may stand in its text."""
    match value:
        case Secret():
            if len(secret := value.reveal()) >= _MIN_SECRET_LENGTH:
                yield secret
        case Struct():
            for name in value.__struct_fields__:
                yield from _find_secrets(getattr(value, name))
        case Mapping():
            for one in value.values():
                yield from _find_secrets(one)
        case tuple():
            for one in value:
                yield from _find_secrets(one)
        case _:
            return


def _mask_fields(node: Any) -> Any:
    match node:
        case dict():
            return {
                name: "***"
                if name in ("sha256", "watermark") and value is not None
                else _mask_fields(value)
                for name, value in node.items()
            }
        case list():
            return [_mask_fields(value) for value in node]
        case _:
            return node


def dump_config(value: Any) -> Any:
    """A configuration as dictionaries, lists and scalars, in the order of the fields.

    Durations are in seconds, and secrets are ``***``.
    """
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
