"""Requests that are none: their names, their text, their JSON, their models and paths."""

import re

from gateway.conformance.cases import Case
from gateway.conformance.mindie.words import CLOSES, asked, path, refused, stream, text

_ID = refused(
    "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 "
    "words in length."
)
_LENGTH = refused(
    re.compile(
        r"text_input must be necessary and data type must be string and length in \(0, \d+\], but "
        "the length of inputs is 0"
    )
)
_ABNORMAL = refused(
    re.compile(r"The type of text_input is abnormal\. The requestId is endpoint_common_\d+")
)
_NO_JSON = refused("Failed to parse request context to json")
_BODY = {"text_input": "hi"}
_UNREADABLE = {
    "cut": b'{"text_input":"hi"',
    "empty": b"",
    "a word": b"hello",
    "not UTF-8": b'{"text_input":"\xff\xfe"}',
    "too deep": b"[" * 100_000,
}

REFUSALS = (
    text("MI-08", {**_BODY, "id": "a b"}, answer_headers=CLOSES, **_ID),
    text("MI-08 empty", {**_BODY, "id": ""}, **_ID),
    text("MI-08 not ASCII", {**_BODY, "id": "é"}, **_ID),
    text("MI-09 5", {**_BODY, "id": 5}, **refused("id must be string type.")),
    text("MI-10", {**_BODY, "id": "a" * 257}, **_ID),
    text("MI-11 absent", {"id": "a123"}, **refused("The text_input not found")),
    text("MI-11 null", {"text_input": None}, **refused("The text_input not found")),
    text("MI-12", {"text_input": 5}, **_ABNORMAL),
    text("MI-12 an object", {"text_input": {}}, **_ABNORMAL),
    text("MI-13", {"text_input": ""}, **_LENGTH),
    text("MI-14", {"text_input": []}, **refused("Parameter text_input arr is empty")),
    *(text(f"MI-15 {word}", body, **_NO_JSON) for word, body in _UNREADABLE.items()),
    text("MI-16", {**_BODY, "parameters": []}, **refused("parameters must be object type.")),
    text("MI-33", {**asked(x=[{}], top_q=None), "y": {"z": 1}}, body_has={"id": "a123"}),
    text("MI-34", asked(), model="nope", **refused("Model nope not found.", 404)),
    text("MI-34 before the body", b"{", model="nope", **refused("Model nope not found.", 404)),
    stream("MI-34 streamed", asked(), model="nope", **refused("Model nope not found.", 404)),
    text("MI-34 no name for a model", asked(), model="a%20b", status=404, body_is=b""),
    Case("MI-35", "POST", path("versions/1/generate"), body=asked(), status=404, body_is=b""),
    Case("MI-35 GET", "GET", path("versions/1/generate"), status=404, body_is=b""),
    stream("MI-36", {"id": "a123"}, answer_headers=CLOSES, **refused("The text_input not found")),
    stream("MI-36 no JSON", b"{", **_NO_JSON),
    stream("MI-36 parameters", asked(details="x"), **refused("details must be boolean type.")),
    text(
        "MI-37",
        b" " * (9 << 20),
        status=413,
        body_is={
            "message": re.compile(
                r"Request body too large\. Maximum allowed size is \d+(\.\d+)?MB\."
            )
        },
    ),
)
