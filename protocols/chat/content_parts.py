"""Content parts of messages, decoded from clients and encoded for workers."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from protocols.chat.params import invalid_type_error, invalid_value_error, missing_error
from protocols.core.extra import KeyTree, read_extra_fields, write_extra
from protocols.core.request import (
    AudioPart,
    ContentPart,
    FilePart,
    ImagePart,
    ReasoningPart,
    RefusalPart,
    TextPart,
    VideoPart,
)


def build_tree(*keys: str, **objects: KeyTree) -> KeyTree:
    """The keys of an object, and those of the objects in it."""
    return {**dict.fromkeys(keys), **objects}


def build_typed_tree(word: str, *keys: str, **objects: KeyTree) -> KeyTree:
    """The same of an object with this type."""
    return {"type": frozenset({word}), **build_tree(*keys, **objects)}


def read_part(value: Any, at: str, allowed: tuple[str, ...]) -> tuple[ContentPart, ...]:
    """The internal parts of one item of a content array. Raises InvalidParameter."""
    if not isinstance(value, dict):
        raise invalid_type_error(at, "an object", value)
    kind = read_string(value, "type", at)
    if kind not in allowed:
        raise invalid_value_error(f"{at}.type", kind, allowed)
    parts = _PART_READERS[kind](value, at)
    parts = tuple([part if part.at else msgspec.structs.replace(part, at=at) for part in parts])
    if (extra := read_extra_fields(value, at, PART_KEYS[kind])) is None:
        return parts
    first, *rest = parts or (ReasoningPart("", at=at),)
    return (msgspec.structs.replace(first, extra=extra), *rest)


def _read_text_part(value: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    return (TextPart(read_string(value, "text", at)),)


def _read_image_part(value: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    image, path = read_object_field(value, "image_url", at), f"{at}.image_url"
    detail = read_optional_string(image, "detail", path)
    details = ("auto", "low", "high")
    if detail is not None and detail not in details:
        raise invalid_value_error(f"{path}.detail", detail, details)
    return (ImagePart(read_string(image, "url", path), detail),)


def _read_audio_part(value: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    audio, path = read_object_field(value, "input_audio", at), f"{at}.input_audio"
    return (AudioPart(read_string(audio, "data", path), read_string(audio, "format", path)),)


def _read_file_part(value: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    file, path = read_object_field(value, "file", at), f"{at}.file"
    part = FilePart(
        read_optional_string(file, "file_id", path),
        read_optional_string(file, "file_data", path),
        read_optional_string(file, "filename", path),
    )
    if part.file_id is None and part.file_data is None:
        raise missing_error(f"{path}.file_id")
    return (part,)


def _read_audio_url_part(value: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    return (
        AudioPart(read_string(read_object_field(value, "audio_url", at), "url", f"{at}.audio_url")),
    )


def _read_video_part(value: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    return (
        VideoPart(read_string(read_object_field(value, "video_url", at), "url", f"{at}.video_url")),
    )


def _read_refusal_part(value: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    return (RefusalPart(read_string(value, "refusal", at)),)


def _read_reasoning_part(value: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    summary = value.get("summary")
    if not isinstance(summary, list):
        raise invalid_type_error(f"{at}.summary", "an array", summary)
    parts = []
    for k, item in enumerate(summary):
        path = f"{at}.summary[{k}]"
        if not isinstance(item, dict):
            raise invalid_type_error(path, "an object", item)
        signature = read_optional_string(item, "signature", path)
        extra = read_extra_fields(item, path, _SUMMARY_KEYS)
        text = read_string(item, "text", path)
        parts.append(ReasoningPart(text, signature, extra=extra, at=path))
    return tuple(parts)


_PART_READERS: Mapping[str, Callable[[Mapping[str, Any], str], tuple[ContentPart, ...]]] = {
    "text": _read_text_part,
    "image_url": _read_image_part,
    "input_audio": _read_audio_part,
    "file": _read_file_part,
    "audio_url": _read_audio_url_part,
    "video_url": _read_video_part,
    "refusal": _read_refusal_part,
    "reasoning": _read_reasoning_part,
}
PART_KEYS: Final[Mapping[str, KeyTree]] = {
    "text": build_typed_tree("text", "text"),
    "image_url": build_typed_tree("image_url", image_url=build_tree("url", "detail")),
    "input_audio": build_typed_tree("input_audio", input_audio=build_tree("data", "format")),
    "file": build_typed_tree("file", file=build_tree("file_id", "file_data", "filename")),
    "audio_url": build_typed_tree("audio_url", audio_url=build_tree("url")),
    "video_url": build_typed_tree("video_url", video_url=build_tree("url")),
    "refusal": build_typed_tree("refusal", "refusal"),
    "reasoning": build_typed_tree("reasoning", "summary"),
}
_SUMMARY_KEYS: Final = build_tree("type", "text", "signature")


def read_string(fields: Mapping[str, Any], name: str, at: str) -> str:
    """A required string. Raises InvalidParameter."""
    value = fields.get(name)
    if isinstance(value, str):
        return value
    if value is None:
        raise missing_error(f"{at}.{name}")
    raise invalid_type_error(f"{at}.{name}", "a string", value)


def read_optional_string(fields: Mapping[str, Any], name: str, at: str) -> str | None:
    """A string, or None. Raises InvalidParameter."""
    return None if fields.get(name) is None else read_string(fields, name, at)


def read_object_field(fields: Mapping[str, Any], name: str, at: str) -> Mapping[str, Any]:
    """A required object. Raises InvalidParameter."""
    value = fields.get(name)
    if isinstance(value, dict):
        return value
    if value is None:
        raise missing_error(f"{at}.{name}")
    raise invalid_type_error(f"{at}.{name}", "an object", value)


def write_part(part: ContentPart) -> dict[str, Any]:
    """A part as an item of a content array. Reasoning is no content: pass none."""
    written = _write_known_part(part)
    if part.extra is not None:
        write_extra(written, part.extra)
    return written


def _write_known_part(part: ContentPart) -> dict[str, Any]:
    match part:
        case ImagePart(url, detail):
            image = {"url": url} if detail is None else {"url": url, "detail": detail}
            return {"type": "image_url", "image_url": image}
        case AudioPart(data, None):
            return {"type": "audio_url", "audio_url": {"url": data}}
        case AudioPart(data, form):
            return {"type": "input_audio", "input_audio": {"data": data, "format": form}}
        case VideoPart(url):
            return {"type": "video_url", "video_url": {"url": url}}
        case FilePart():
            file = {name: value for name in _FILE_KEYS if (value := getattr(part, name))}
            return {"type": "file", "file": file}
        case RefusalPart(text):
            return {"type": "refusal", "refusal": text}
        case _:
            return {"type": "text", "text": part.text}


_FILE_KEYS: Final = ("file_id", "file_data", "filename")
