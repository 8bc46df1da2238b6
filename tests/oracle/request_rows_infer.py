"""Requests to infer: tensors in JSON, and as binary data after the JSON."""

import gzip
import zlib
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from tests.oracle.request_rows import TRT, VLLM, Row

TEXT: Final = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["hi"]}
MOST: Final = {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [5]}
HEADER: Final = "Inference-Header-Content-Length"


def make_row(body: Any, differs: str = "", *, model: str = TRT, **headers: str) -> Row:
    sent = body if isinstance(body, bytes) else msgspec.json.encode(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Row("POST", f"{model}/infer", sent, named, differs)


def remove_keys(tensor: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in tensor.items() if name not in names}


BODIES: Final[tuple[Any, ...]] = (
    b"", b"{", b"[]", b"{}", {"inputs": 1}, {"inputs": []}, {"inputs": None}, {"inputs": [1]},
    {"inputs": [{}]}, {"id": 5}, {"id": 5, "inputs": []},
    {"inputs": [remove_keys(TEXT, "datatype", "shape", "data")]},
    {"inputs": [remove_keys(TEXT, "shape", "data")]}, {"inputs": [remove_keys(TEXT, "data")]},
    {"inputs": [TEXT, MOST]}, {"inputs": [TEXT, MOST], "id": "x"},
    {"inputs": [TEXT, TEXT, MOST]}, {"inputs": [MOST]}, {"inputs": [TEXT]},
    {"inputs": [TEXT, MOST | {"data": [5.5]}]}, {"inputs": [TEXT, MOST | {"data": ["5"]}]},
    {"inputs": [TEXT, MOST | {"datatype": "INT64"}]},
)  # fmt: skip
CHANGES: Final[tuple[dict[str, Any], ...]] = (
    {"data": "hi"}, {"data": ["a", "b"]}, {"data": [5]}, {"data": []}, {"data": [["hi"]]},
    {"datatype": "FP32"}, {"datatype": "XX"}, {"datatype": 5}, {"name": 5}, {"name": "zzz"},
    {"shape": 1}, {"shape": ["a"]}, {"shape": [1]}, {"shape": [2, 1]}, {"shape": [-1, 1]},
    {"shape": [0, 1]}, {"shape": [1, 1, 1]}, {"shape": [1.5, 1]}, {"parameters": 5},
    {"parameters": {"binary_data_size": 6}}, {"shape": [1, 2], "data": ["a", "b"]},
)  # fmt: skip
"""Changes of the prompt's tensor."""
MORE: Final[tuple[dict[str, Any], ...]] = (
    {"parameters": 1}, {"parameters": {"triton_x": 1}}, {"parameters": {"x": [1]}},
    {"parameters": {"x": None}}, {"parameters": {"priority": "a"}},
    {"parameters": {"sequence_id": 1, "timeout": 5000000, "binary_data_output": 1}},
    {"parameters": {"binary_data_output": True}}, {"outputs": []}, {"outputs": 1},
    {"outputs": [{}]}, {"outputs": [{"name": 5}]}, {"outputs": [{"name": "nope"}]},
    {"outputs": [{"name": "text_output"}]},
    {"outputs": [{"name": "text_output"}, {"name": "text_output"}]},
    {"outputs": [{"name": "text_output", "parameters": {"binary_data": 1}}]},
    {"outputs": [{"name": "text_output", "parameters": {"binary_data": True}}]},
    {
        "outputs": [{"name": "text_output", "parameters": {"binary_data": False}}],
        "parameters": {"binary_data_output": True},
    },
)  # fmt: skip
"""Additions to two valid inputs."""


def iterate_infer_rows() -> Iterator[Row]:
    """Yield all requests to infer."""
    for body in BODIES:
        yield make_row(body)
    for change in CHANGES:
        yield make_row({"inputs": [TEXT | change, MOST]})
    for fields in MORE:
        yield make_row({"inputs": [TEXT, MOST], **fields})
    for count in (2, 5):
        texts = TEXT | {"shape": [count, 1], "data": list("abcde")[:count]}
        yield make_row({"inputs": [texts, MOST | {"shape": [count, 1], "data": [1] * count}]})
    yield make_row({"inputs": [TEXT | {"shape": [1]}]}, "decoupled", model=VLLM)
    yield make_row(b"{", model="/v2/models/nope")
    yield make_row({"inputs": []}, model=f"{TRT}/versions/9")
    yield from iterate_compressed_rows()
    yield from iterate_binary_rows()


def iterate_compressed_rows() -> Iterator[Row]:
    """Yield compressed bodies."""
    good = msgspec.json.encode({"inputs": [TEXT, MOST]})
    yield make_row(gzip.compress(good, mtime=0), Content_Encoding="gzip")
    yield make_row(zlib.compress(good), Content_Encoding="deflate")
    yield make_row(good, "not packed", Content_Encoding="gzip")
    for encoding in ("br", "GZIP", "", "identity"):
        yield make_row(good, Content_Encoding=encoding)


def build_json_header(text: int = 6, most: int = 4) -> bytes:
    """Build the JSON before the binary data, with the sizes of both inputs."""
    inputs = [
        remove_keys(one, "data") | {"parameters": {"binary_data_size": size}}
        for one, size in ((TEXT, text), (MOST, most))
    ]
    return msgspec.json.encode({"inputs": inputs, "parameters": {"binary_data_output": True}})


def iterate_binary_rows() -> Iterator[Row]:
    """Yield bodies with binary data after the JSON."""
    data = b"\x02\0\0\0hi\x07\0\0\0"
    for behind, differs in (
        (data, ""),
        (data[:-1], ""),
        (data + b"zz", ""),
        (b"\x09" + data[1:], "cut strings"),
    ):
        yield make_row(
            build_json_header() + behind, differs, **{HEADER: str(len(build_json_header()))}
        )
    for sizes, behind, differs in (
        ((5, 4), data[:5] + data[6:], "cut strings"),
        ((6, -4), data, ""),
    ):
        yield make_row(
            build_json_header(*sizes) + behind,
            differs,
            **{HEADER: str(len(build_json_header(*sizes)))},
        )
    for length, differs in (
        ("-1", ""),
        ("999999", ""),
        ("0", ""),
        ("abc", "header length"),
        ("", "header length"),
    ):
        yield make_row(build_json_header() + data, differs, **{HEADER: length})
    yield make_row(build_json_header() + data)
