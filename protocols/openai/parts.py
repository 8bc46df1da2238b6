"""The parts of a message's content: each kind read from a client, and written for a worker."""

from collections.abc import Callable, Mapping
from typing import Any

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
from protocols.openai.reading import invalid_type_error, invalid_value_error, missing_error


def read_part(got: Any, at: str, allowed: tuple[str, ...]) -> tuple[ContentPart, ...]:
    """One item of a content array, as the parts it stands for. Raises InvalidParameter."""
    if not isinstance(got, dict):
        raise invalid_type_error(at, "an object", got)
    kind = read_string(got, "type", at)
    if kind not in allowed:
        raise invalid_value_error(f"{at}.type", kind, allowed)
    return _PART_READERS[kind](got, at)


def _read_text_part(got: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    return (TextPart(read_string(got, "text", at)),)


def _read_image_part(got: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    image, where = read_object_field(got, "image_url", at), f"{at}.image_url"
    detail = read_optional_string(image, "detail", where)
    details = ("auto", "low", "high")
    if detail is not None and detail not in details:
        raise invalid_value_error(f"{where}.detail", detail, details)
    return (ImagePart(read_string(image, "url", where), detail),)


def _read_audio_part(got: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    audio, where = read_object_field(got, "input_audio", at), f"{at}.input_audio"
    return (AudioPart(read_string(audio, "data", where), read_string(audio, "format", where)),)


def _read_file_part(got: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    file, where = read_object_field(got, "file", at), f"{at}.file"
    part = FilePart(
        read_optional_string(file, "file_id", where),
        read_optional_string(file, "file_data", where),
        read_optional_string(file, "filename", where),
    )
    if part.file_id is None and part.file_data is None:
        raise missing_error(f"{where}.file_id")
    return (part,)


def _read_audio_url_part(got: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    return (
        AudioPart(read_string(read_object_field(got, "audio_url", at), "url", f"{at}.audio_url")),
    )


def _read_video_part(got: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    return (
        VideoPart(read_string(read_object_field(got, "video_url", at), "url", f"{at}.video_url")),
    )


def _read_refusal_part(got: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    return (RefusalPart(read_string(got, "refusal", at)),)


def _read_reasoning_part(got: Mapping[str, Any], at: str) -> tuple[ContentPart, ...]:
    summary = got.get("summary")
    if not isinstance(summary, list):
        raise invalid_type_error(f"{at}.summary", "an array", summary)
    parts = []
    for k, item in enumerate(summary):
        where = f"{at}.summary[{k}]"
        if not isinstance(item, dict):
            raise invalid_type_error(where, "an object", item)
        signature = read_optional_string(item, "signature", where)
        parts.append(ReasoningPart(read_string(item, "text", where), signature))
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


def read_string(fields: Mapping[str, Any], name: str, at: str) -> str:
    """A required string. Raises InvalidParameter."""
    got = fields.get(name)
    if isinstance(got, str):
        return got
    if got is None:
        raise missing_error(f"{at}.{name}")
    raise invalid_type_error(f"{at}.{name}", "a string", got)


def read_optional_string(fields: Mapping[str, Any], name: str, at: str) -> str | None:
    """A string, or None. Raises InvalidParameter."""
    return None if fields.get(name) is None else read_string(fields, name, at)


def read_object_field(fields: Mapping[str, Any], name: str, at: str) -> Mapping[str, Any]:
    """A required object. Raises InvalidParameter."""
    got = fields.get(name)
    if isinstance(got, dict):
        return got
    if got is None:
        raise missing_error(f"{at}.{name}")
    raise invalid_type_error(f"{at}.{name}", "an object", got)


def write_part(part: ContentPart) -> dict[str, Any]:
    """A part as an item of a content array. Thoughts are no content: give none."""
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
            file = {name: got for name in part.__struct_fields__ if (got := getattr(part, name))}
            return {"type": "file", "file": file}
        case _:
            return {"type": "text", "text": part.text}
