"""Multipart forms are read as every other server reads them, or rejected.

The other parsers are werkzeug's, aiohttp's, and Python's own for e-mail, whose rules are the most
lenient: line ends of any kind, folded headers, encoded words.
"""

import asyncio
import email.message
import email.parser
import email.policy
import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
from aiohttp import BodyPartReader, MultipartReader, StreamReader
from aiohttp.multipart import BadContentDispositionHeader
from hypothesis import given, settings
from hypothesis import strategies as st
from werkzeug.formparser import MultiPartParser

from protocols.core.errors import ClientError, InvalidParameter, MalformedRequest
from protocols.openai import OpenAI
from protocols.openai.forms import read_form

FORM: Final = "multipart/form-data; boundary=b0"
AUDIO: Final = b'\x00\r\n--b1\xff\r\n\r\nname="model"\r\n--b'
MODEL: Final = b'Content-Disposition: form-data; name="model"\r\n\r\nallowed'
FILE: Final = (
    b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n'
    b"Content-Type: audio/wav\r\n\r\n" + AUDIO
)
OTHER: Final = b'Content-Disposition: form-data; name="model"\r\n\r\nforbidden'

Fields = list[tuple[str, bytes]]


def build_body(*parts: bytes) -> bytes:
    return b"".join(b"--b0\r\n%b\r\n" % part for part in parts) + b"--b0--\r\n"


# --- the parsers of other servers -----------------------------------------------------------------


def parse_with_werkzeug(body: bytes, content_type: str) -> Fields:
    boundary = re.search('boundary="?([^";]*)', content_type)
    assert boundary is not None
    parser = MultiPartParser(stream_factory=lambda *_, **__: io.BytesIO())
    form, files = parser.parse(io.BytesIO(body), boundary[1].encode(), len(body))
    fields = [(name, value.encode()) for name, value in form.items(multi=True)]
    return fields + [(name, file.read()) for name, file in files.items(multi=True)]


def parse_with_email(body: bytes, content_type: str) -> Fields:
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
    fields: Fields = []
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        value = part.get_payload(decode=True)
        assert isinstance(value, bytes)
        fields.append((str(name), value))
    return fields


def parse_with_aiohttp(body: bytes, content_type: str) -> Fields:
    class Transport:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    async def parse() -> Fields:
        stream = StreamReader(Transport(), 1 << 20, loop=asyncio.get_running_loop())  # type: ignore[arg-type]
        stream.feed_data(body)
        stream.feed_eof()
        fields: Fields = []
        async for part in MultipartReader({"Content-Type": content_type}, stream):
            assert isinstance(part, BodyPartReader)
            fields.append((str(part.name), bytes(await part.read())))
        return fields

    with warnings.catch_warnings():  # it warns of names that it can't read, and leaves them out
        warnings.simplefilter("ignore", BadContentDispositionHeader)
        return asyncio.run(parse())


PARSERS: Final[Sequence[Callable[[bytes, str], Fields]]] = (
    parse_with_werkzeug,
    parse_with_aiohttp,
    parse_with_email,
)


def parse_strictly(body: bytes, content_type: str = FORM) -> Fields:
    form = read_form(body, content_type)
    return [(field.name, body[field.start : field.end]) for field in form.fields]


# --- forms as clients write them ------------------------------------------------------------------


@pytest.mark.parametrize("parse", PARSERS)
def test_form_is_read_as_other_servers_read_it(parse: Callable[[bytes, str], Fields]) -> None:
    text = b'Content-Disposition: form-data; name="prompt"\r\n\r\nh\xc3\xa9llo'
    body = build_body(text, MODEL, FILE.replace(AUDIO, b"\x00\x01\xff"))

    assert sorted(parse(body, FORM)) == sorted(parse_strictly(body))


@pytest.mark.parametrize(
    "head",
    [
        b"content-disposition: form-data; name=model",
        b'Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"',
        b'Content-Type: text/plain; charset=UTF-8\r\nContent-Disposition: form-data;name="model"',
        b'CONTENT-DISPOSITION:form-data;name="model"',
        b'Content-Disposition: form-data; name="model"\r\nContent-Length: 7',
        b'Content-Disposition: form-data; name="model"\r\nContent-Transfer-Encoding: 8bit',
    ],
)
def test_head_of_a_field_is_written_in_one_way(head: bytes) -> None:
    form = read_form(build_body(head + b"\r\n\r\nallowed"), FORM)

    written = form.write("")
    assert form.model == "allowed"
    assert written.startswith(b'--b0\r\nContent-Disposition: form-data; name="model"\r\n')
    assert b"Length" not in written
    assert [parse(written, form.content_type) for parse in PARSERS] == [[("model", b"allowed")]] * 3


def test_names_of_files_are_kept() -> None:
    head = b'Content-Disposition: form-data; name="file"; filename="%22\xc3\xa9.wav"'
    extended_name = b"; filename*=utf-8''%C3%A9.wav"
    body = build_body(head + extended_name + b"\r\nContent-Type: audio/wav\r\n\r\nx")

    assert read_form(body, FORM).write("") == body


@pytest.mark.parametrize("boundary", ["b0", '"b0"', '"b:0/=?"', "----b'0+_."])
def test_boundary_is_quoted_where_it_must_be(boundary: str) -> None:
    plain = boundary.strip('"').encode()
    body = build_body(MODEL, FILE).replace(b"b0", plain)

    form = read_form(body, f"multipart/form-data; boundary={boundary}")

    assert form.content_type.endswith('"b:0/=?"') == (":" in boundary)
    assert read_form(form.write("w"), form.content_type).model == "w"


def test_form_without_a_model_is_written_as_it_was_or_with_one() -> None:
    form = read_form(build_body(FILE), FORM)

    assert form.model == ""
    assert form.write("") == build_body(FILE)
    assert form.write("w") == build_body(MODEL.replace(b"allowed", b"w"), FILE)
    assert read_form(b"--b0--", FORM).write("") == b"--b0--\r\n"


# --- ambiguous forms ------------------------------------------------------------------------------


def build_nested(content_type: bytes) -> bytes:
    """A field that holds another form."""
    head = b'Content-Disposition: form-data; name="x"\r\nContent-Type: ' + content_type
    return head + b"\r\n\r\n--b9\r\n" + OTHER + b"\r\n--b9--"


HEAD: Final = b'Content-Disposition: form-data; name="model"'
AMBIGUOUS: Final = {
    "second field": build_body(MODEL, OTHER),
    "second header": build_body(HEAD + b"\r\n" + HEAD.replace(b"model", b"x") + b"\r\n\r\nallowed"),
    "blank before the equals sign": build_body(MODEL, OTHER.replace(b"name=", b"name =")),
    "blank after the equals sign": build_body(MODEL, OTHER.replace(b"name=", b"name= ")),
    "encoded name": build_body(MODEL, OTHER.replace(b'name="model"', b"name*=utf-8''model")),
    "second name": build_body(MODEL, OTHER.replace(b"name=", b'name="x"; name=')),
    "continued name": build_body(MODEL, OTHER.replace(b'name="model"', b"name*0=mo; name*1=del")),
    "escaped letter": build_body(MODEL, OTHER.replace(b"model", b"mo\\del")),
    "percent-encoded letter": build_body(MODEL, OTHER.replace(b"model", b"m%6fdel")),
    "other case": build_body(MODEL, OTHER.replace(b"model", b"MODEL")),
    "blank in the name": build_body(MODEL, OTHER.replace(b"model", b" model")),
    "full-width letters": build_body(MODEL, OTHER.replace(b"model", "\uff4dodel".encode())),
    "list": build_body(MODEL, OTHER.replace(b"model", b"model[]")),
    "other parameter": build_body(MODEL, OTHER.replace(b"name=", b'x="y"; name=')),
    "parameter in a file's name": build_body(
        MODEL, FILE.replace(b"a.wav", b"a; name=model"), OTHER.replace(b"model", b"x")
    ),
    "blank before the colon": build_body(MODEL, OTHER.replace(b"on:", b"on :")),
    "folded header": build_body(MODEL, OTHER.replace(b"; name", b";\r\n name")),
    "bare line feed": build_body(MODEL, OTHER.replace(b"\r\n\r\n", b"\n\n")),
    "bare line feed in a header": build_body(MODEL, b"X: y\n" + OTHER),
    "Unicode line separator": build_body(MODEL, "Content-Type: text/plain\u2028".encode() + OTHER),
    "line feed before the boundary": build_body(MODEL, FILE + b"\n--b0\r\n" + OTHER),
    "boundary within a value": build_body(MODEL, FILE + b"--b0\r\n" + OTHER),
    "blank after the boundary": build_body(MODEL, FILE + b"\r\n--b0 \r\n" + OTHER),
    "longer boundary": build_body(MODEL, FILE + b"\r\n--b01\r\n" + OTHER),
    "preamble": b"--b1\r\n" + build_body(MODEL),
    "line before the boundary": b"\r\n" + build_body(MODEL),
    "epilogue": build_body(MODEL) + build_body(OTHER),
    "no end": build_body(MODEL)[:-4],
    "value without its line end": build_body(MODEL, HEAD + b"\r\n\r\n--b0--"),
    "no name": build_body(MODEL, b"Content-Disposition: form-data\r\n\r\nforbidden"),
    "file's name only": build_body(MODEL, OTHER.replace(b"name=", b"filename=")),
    "no header": build_body(MODEL, b"\r\nforbidden"),
    "no disposition": build_body(MODEL, b"X: y\r\n\r\nforbidden"),
    "other disposition": build_body(MODEL, OTHER.replace(b"form-data", b"attachment")),
    "unknown header": build_body(MODEL, b"X: y\r\n" + OTHER),
    "encoded value": build_body(b"Content-Transfer-Encoding: base64\r\n" + MODEL),
    "model as a file": build_body(MODEL.replace(b'model"', b'model"; filename="a"')),
    "model in another charset": build_body(b"Content-Type: text/plain; charset=utf-7\r\n" + MODEL),
    "model as JSON": build_body(b"Content-Type: application/json\r\n" + MODEL),
    "malformed content type": build_body(b"Content-Type: text\r\n" + MODEL),
    "header that is not UTF-8": build_body(MODEL.replace(b"model", b"mod\xff")),
    "charset of all fields": build_body(
        MODEL, b'Content-Disposition: form-data; name="_charset_"\r\n\r\nutf-16'
    ),
    "encoded word": build_body(MODEL, OTHER.replace(b'"model"', b'"=?utf-8?q?model?="')),
    "encoded word in base64": build_body(
        MODEL, OTHER.replace(b'"model"', b'"=?utf-8?b?bW9kZWw=?="')
    ),
    "form within a field": build_body(MODEL, build_nested(b"multipart/mixed; boundary=b9")),
    "message within a field": build_body(MODEL, build_nested(b"Message/rfc822")),
    "NUL in the name": build_body(MODEL, OTHER.replace(b"model", b"model\x00")),
    "zero-width space": build_body(MODEL, OTHER.replace(b"model", "mo\u200bdel".encode())),
    "other blank": build_body(MODEL, OTHER.replace(b"; name", b";\x0bname")),
    "second line of the value": build_body(MODEL + b"\r\nforbidden"),
    "line end in a file's name": build_body(
        MODEL, FILE.replace(b'filename="a.wav"', b"filename*=utf-8''a%0d%0aX: y")
    ),
    "too many fields": build_body(MODEL, *[FILE] * 1000),
    "endless header": b"--b0\r\n" + b"x" * 20_000,
}  # fmt: skip


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_form_that_servers_may_read_in_several_ways_is_refused(case: str) -> None:
    with pytest.raises((MalformedRequest, InvalidParameter)):
        read_form(AMBIGUOUS[case], FORM)


def test_other_servers_read_another_model_in_some_of_these_forms() -> None:
    """In each of the forms above, at least one server reads ``forbidden``."""
    misread = set()
    for case, body in AMBIGUOUS.items():
        for parse in PARSERS:
            try:
                fields = parse(body, FORM)
            except Exception:  # noqa: BLE001, S112 - that server refuses it, too
                continue
            if ("model", b"forbidden") in fields:
                misread.add(case)

    assert len(misread) >= 10, misread
    assert {"second field", "encoded name", "blank before the colon", "encoded word"} <= misread


@pytest.mark.parametrize(
    "value", [b"", b"\xff", b"m" * 1025, b" m", b"m\n", b"a\x00b", "m\u2028".encode()]
)
def test_name_of_a_model_is_one_line_of_text(value: bytes) -> None:
    with pytest.raises(InvalidParameter) as excinfo:
        read_form(build_body(MODEL.replace(b"allowed", value)), FORM)

    assert excinfo.value.param == "model"


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=b0; boundary=b1",
        "multipart/form-data; boundary=b0, boundary=b1",
        "multipart/form-data; boundary*=utf-8''b0",
        'multipart/form-data; boundary="b0',
        'multipart/form-data; boundary="b 0"',
        'multipart/form-data; boundary="--"',
        "multipart/form-data; boundary=" + "b" * 71,
        "multipart/form-data; boundary=b0; charset=utf-16",
    ],
)
def test_content_type_has_one_plain_boundary(content_type: str) -> None:
    with pytest.raises(MalformedRequest) as excinfo:
        read_form(build_body(MODEL), content_type)

    body = OpenAI().encode_error(excinfo.value, None).body
    assert b"We could not parse the form of your request" in body


PIECES: Final = [
    b"--b0", b"--b0--", b"--", b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b"\x00", b'"',
    b"\\", b"model", b"MODEL", b"name", b'name="model"', b"name=model", b'; name="model"',
    b"filename*=", b"Content-Disposition: form-data", b"Content-Disposition", b":", b";", b"=",
    b"allowed", b"forbidden", b"X: y", MODEL, OTHER, FILE,
]  # fmt: skip


@st.composite
def mutated_forms(draw: st.DrawFn) -> bytes:
    """A form with a few pieces inserted, removed or doubled."""
    body = build_body(*draw(st.permutations([MODEL, FILE])))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        end = draw(st.integers(at, min(len(body), at + 8)))
        body = body[:at] + draw(st.sampled_from([*PIECES, b""])) + body[end:]
    return body


@settings(max_examples=300, deadline=None)
@given(mutated_forms())
def test_worker_reads_the_model_that_the_gateway_has_read(body: bytes) -> None:
    """Any accepted form is sent on with one model for every parser."""
    try:
        form = read_form(body, FORM)
    except ClientError:
        return
    written = form.write("routed" if form.model else "")

    for parse in PARSERS:
        models = [value for name, value in parse(written, form.content_type) if name == "model"]
        assert models == ([b"routed"] if form.model else [])
    assert [value for name, value in parse_strictly(written) if name != "model"] == [
        value for name, value in parse_strictly(body) if name != "model"
    ]
