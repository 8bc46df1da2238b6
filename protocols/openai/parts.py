"""The parts of a message's content: each kind read from a client, and written for a worker."""

from collections.abc import Callable, Mapping
from typing import Any

from gateway.core.types import (
    AudioPart,
    FilePart,
    ImagePart,
    Part,
    ReasoningPart,
    RefusalPart,
    TextPart,
    VideoPart,
)
from protocols.openai.reading import missing, wrong_type, wrong_value


def read_part(got: Any, at: str, allowed: tuple[str, ...]) -> tuple[Part, ...]:
    """One item of a content array, as the parts it stands for. Raises InvalidParameter."""
    if not isinstance(got, dict):
        raise wrong_type(at, "an object", got)
    kind = text_of(got, "type", at)
    if kind not in allowed:
        raise wrong_value(f"{at}.type", kind, allowed)
    return _PARTS[kind](got, at)


def _text_part(got: Mapping[str, Any], at: str) -> tuple[Part, ...]:
    return (TextPart(text_of(got, "text", at)),)


def _image_part(got: Mapping[str, Any], at: str) -> tuple[Part, ...]:
    image, where = object_of(got, "image_url", at), f"{at}.image_url"
    detail = optional_text(image, "detail", where)
    details = ("auto", "low", "high")
    if detail is not None and detail not in details:
        raise wrong_value(f"{where}.detail", detail, details)
    return (ImagePart(text_of(image, "url", where), detail),)


def _audio_part(got: Mapping[str, Any], at: str) -> tuple[Part, ...]:
    audio, where = object_of(got, "input_audio", at), f"{at}.input_audio"
    return (AudioPart(text_of(audio, "data", where), text_of(audio, "format", where)),)


def _file_part(got: Mapping[str, Any], at: str) -> tuple[Part, ...]:
    file, where = object_of(got, "file", at), f"{at}.file"
    part = FilePart(
        optional_text(file, "file_id", where),
        optional_text(file, "file_data", where),
        optional_text(file, "filename", where),
    )
    if part.file_id is None and part.file_data is None:
        raise missing(f"{where}.file_id")
    return (part,)


def _audio_url_part(got: Mapping[str, Any], at: str) -> tuple[Part, ...]:
    return (AudioPart(text_of(object_of(got, "audio_url", at), "url", f"{at}.audio_url")),)


def _video_part(got: Mapping[str, Any], at: str) -> tuple[Part, ...]:
    return (VideoPart(text_of(object_of(got, "video_url", at), "url", f"{at}.video_url")),)


def _refusal_part(got: Mapping[str, Any], at: str) -> tuple[Part, ...]:
    return (RefusalPart(text_of(got, "refusal", at)),)


def _reasoning_part(got: Mapping[str, Any], at: str) -> tuple[Part, ...]:
    summary = got.get("summary")
    if not isinstance(summary, list):
        raise wrong_type(f"{at}.summary", "an array", summary)
    parts = []
    for k, item in enumerate(summary):
        where = f"{at}.summary[{k}]"
        if not isinstance(item, dict):
            raise wrong_type(where, "an object", item)
        signature = optional_text(item, "signature", where)
        parts.append(ReasoningPart(text_of(item, "text", where), signature))
    return tuple(parts)


_PARTS: Mapping[str, Callable[[Mapping[str, Any], str], tuple[Part, ...]]] = {
    "text": _text_part,
    "image_url": _image_part,
    "input_audio": _audio_part,
    "file": _file_part,
    "audio_url": _audio_url_part,
    "video_url": _video_part,
    "refusal": _refusal_part,
    "reasoning": _reasoning_part,
}


def text_of(fields: Mapping[str, Any], name: str, at: str) -> str:
    """A required string. Raises InvalidParameter."""
    got = fields.get(name)
    if isinstance(got, str):
        return got
    if got is None:
        raise missing(f"{at}.{name}")
    raise wrong_type(f"{at}.{name}", "a string", got)


def optional_text(fields: Mapping[str, Any], name: str, at: str) -> str | None:
    """A string, or None. Raises InvalidParameter."""
    return None if fields.get(name) is None else text_of(fields, name, at)


def object_of(fields: Mapping[str, Any], name: str, at: str) -> Mapping[str, Any]:
    """A required object. Raises InvalidParameter."""
    got = fields.get(name)
    if isinstance(got, dict):
        return got
    if got is None:
        raise missing(f"{at}.{name}")
    raise wrong_type(f"{at}.{name}", "an object", got)


def write_part(part: Part) -> dict[str, Any]:
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
