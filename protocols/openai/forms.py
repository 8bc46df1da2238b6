"""Reads forms with files (multipart/form-data, RFC 7578) strictly, and writes them anew.

Servers disagree about forms that are not written as the RFC says, so a worker might read another
model than the gateway. What another server could read in another way is refused: a boundary that
stands elsewhere too, other line ends, a blank before a colon, folded, repeated or unknown headers,
escapes, a second field ``model`` or one whose name resembles it. Workers get only what was read.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import unquote

from msgspec import Struct

from protocols.core.errors import InvalidParameter, MalformedRequest

MULTIPART: Final = "multipart/form-data"
_MODEL: Final = "model"
_MAX_FIELDS: Final = 1000
_MAX_HEAD: Final = 16 << 10
"""Bytes of a field's headers."""
_MAX_MODEL_NAME: Final = 1024

_WORD: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_HEADER: Final = re.compile(rf"({_WORD}):[ \t]*(.*)")
_PARAM: Final = re.compile(rf'[ \t]*;[ \t]*({_WORD})=(?:({_WORD})|"([^"\\]*)")')
_BOUNDARY: Final = re.compile(r"(?=.*[0-9A-Za-z])[0-9A-Za-z'()+_,./:=?-]{1,70}")
_MEDIA_TYPE: Final = re.compile(rf'{_WORD}/{_WORD}(?:[ \t]*;[ \t]*{_WORD}=(?:{_WORD}|"[^"\\]*"))*')
_PLAIN_TEXT: Final = re.compile(r'text/plain(?:[ \t]*;[ \t]*charset="?utf-8"?)?', re.IGNORECASE)
_PARAM_IN_TEXT: Final = re.compile(r";\s*(?:file)?name\b", re.IGNORECASE)
"""What a server that splits at every ``;`` would take for a parameter."""
_IGNORED_HEADERS: Final[Mapping[str, re.Pattern[str]]] = {
    "content-length": re.compile("[0-9]+"),
    "content-transfer-encoding": re.compile("7bit|8bit|binary", re.IGNORECASE),
}
"""Headers that receivers ignore (RFC 7578, 4.8), and the values that change nothing."""
_NESTED: Final = re.compile("(?:multipart|message)/", re.IGNORECASE)
"""Types of parts with fields of their own, which some servers read as those of the form."""
_ENCODED_WORD: Final = "=?"
"""What begins a word that mail readers decode (RFC 2047)."""
_NO_LETTERS: Final = re.compile("[^a-z]")


class FormField(Struct, frozen=True):
    """A field of a form, and where its value stands in the body.

    ``params`` are ``name``, ``filename`` and ``filename*`` as they are written, without quotes.
    """

    params: Mapping[str, str]
    content_type: str | None
    start: int
    end: int

    @property
    def name(self) -> str:
        """The name of the field."""
        return self.params["name"]

    def write_head(self) -> bytes:
        """The field's headers, and the blank line after them."""
        params = "".join(
            f"; {name}={text}" if name.endswith("*") else f'; {name}="{text}"'
            for name, text in self.params.items()
        )
        kind = "" if self.content_type is None else f"Content-Type: {self.content_type}\r\n"
        return f"\r\nContent-Disposition: form-data{params}\r\n{kind}\r\n".encode()


class Form(Struct, frozen=True):
    """A form that was read. ``model`` is "" if no field names one."""

    body: bytes
    boundary: str
    fields: Sequence[FormField]
    model: str

    @property
    def content_type(self) -> str:
        """The content type of what ``write`` returns."""
        is_token = re.fullmatch(_WORD, self.boundary) is not None
        return f"{MULTIPART}; boundary=" + (self.boundary if is_token else f'"{self.boundary}"')

    def write(self, model: str) -> bytes:
        """The form with this model, as its first field if it had none; as it was if that is ""."""
        delimiter = b"--" + self.boundary.encode()
        pieces: list[bytes] = []
        if model and not self.model:
            head = FormField({"name": _MODEL}, None, 0, 0).write_head()
            pieces += (delimiter, head, model.encode(), b"\r\n")
        for field in self.fields:
            renamed = model and field.name == _MODEL
            value = model.encode() if renamed else self.body[field.start : field.end]
            pieces += (delimiter, field.write_head(), value, b"\r\n")
        return b"".join((*pieces, delimiter, b"--\r\n"))


def read_form(body: bytes, content_type: str) -> Form:
    """Read a form. Raises MalformedRequest, or InvalidParameter for its model."""
    boundary = _read_boundary(content_type)
    fields = _read_fields(body, b"--" + boundary.encode())
    models = [field for field in fields if _check_name(body, field.name, field) == _MODEL]
    if len(models) > 1:
        raise _build_model_error("the form has the field 'model' more than once")
    return Form(body, boundary, fields, _read_model(body, models[0]) if models else "")


def _read_boundary(content_type: str) -> str:
    at = content_type.find(";")
    params = _read_params(content_type[at:] if at >= 0 else "", "the content type of the form")
    if params.get("charset", "utf-8").lower() != "utf-8":
        raise _build_error("the form must be in UTF-8")
    boundary = params.get("boundary")
    if boundary is None:
        raise _build_error("the content type of the form has no boundary")
    if not _BOUNDARY.fullmatch(boundary):
        raise _build_error(
            "the boundary of the form must be 1 to 70 letters, digits or '()+_,-./:=?"
        )
    return boundary


def _read_params(text: str, where: str) -> dict[str, str]:
    """Parameters, each after a semicolon, by lower-case name."""
    params: dict[str, str] = {}
    at, text = 0, text.rstrip(" \t")
    while at < len(text):
        match = _PARAM.match(text, at)
        if match is None:
            raise _build_error(f"{where} has a malformed parameter")
        name = match[1].lower()
        if name in params:
            raise _build_error(f"{where} has its parameter {name!r} more than once")
        params[name] = match[2] if match[2] is not None else match[3]
        at = match.end()
    return params


def _read_fields(body: bytes, delimiter: bytes) -> list[FormField]:
    if not body.startswith(delimiter):
        raise _build_error("the form does not begin with its boundary")
    fields: list[FormField] = []
    at = len(delimiter)
    while not body.startswith(b"--", at):
        if len(fields) == _MAX_FIELDS:
            raise _build_error(f"the form has more than {_MAX_FIELDS} fields")
        head_end = body.find(b"\r\n\r\n", at, at + _MAX_HEAD)
        end = body.find(b"\r\n" + delimiter, head_end + 4) if head_end >= 0 else -1
        if end < 0 or not body.startswith(b"\r\n", at):
            raise _build_error("a field of the form has no end, or no headers within 16 KiB")
        fields.append(_read_field(body[at + 2 : head_end], head_end + 4, end))
        at = end + 2 + len(delimiter)
    if body[at + 2 :] not in (b"", b"\r\n"):
        raise _build_error("the form has data after its end")
    if body.count(delimiter) != len(fields) + 1:
        raise _build_error("the boundary of the form stands elsewhere in it, too")
    return fields


def _read_field(head: bytes, start: int, end: int) -> FormField:
    headers: dict[str, str] = {}
    try:
        lines = head.decode().split("\r\n")
    except UnicodeDecodeError:
        raise _build_error("a field of the form has headers that are not UTF-8") from None
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None or not match[2].replace("\t", " ").isprintable():
            raise _build_error("a field of the form has a malformed header")
        name, value = match[1].lower(), match[2].rstrip(" \t")
        if name in headers:
            raise _build_error(f"a field of the form has its header {match[1]!r} more than once")
        headers[name] = value
    disposition = headers.pop("content-disposition", "")
    content_type = headers.pop("content-type", None)
    if content_type is not None and not _MEDIA_TYPE.fullmatch(content_type):
        raise _build_error("a field of the form has a malformed Content-Type")
    if content_type is not None and _NESTED.match(content_type):
        raise _build_error("a field of the form has fields of its own")
    for name, value in headers.items():
        if name not in _IGNORED_HEADERS or not _IGNORED_HEADERS[name].fullmatch(value):
            raise _build_error(
                f"a field of the form has the header {name!r}, which forms may not have"
            )
    return FormField(_read_disposition(disposition), content_type, start, end)


def _read_disposition(text: str) -> Mapping[str, str]:
    kind, semicolon, rest = text.partition(";")
    if kind.strip(" \t").lower() != "form-data":
        raise _build_error("a field of the form has no Content-Disposition: form-data")
    params = _read_params(semicolon + rest, "the Content-Disposition of a form's field")
    if "name" not in params or params.keys() - {"name", "filename", "filename*"}:
        text = "a form's field has one name, and may have 'filename' and 'filename*' beside it"
        raise _build_error(text)
    if _ENCODED_WORD in params["name"]:
        raise _build_error("a field of the form has an encoded name")
    if any(map(_PARAM_IN_TEXT.search, params.values())):
        raise _build_error("a name in the form contains another parameter")
    return {name: params[name] for name in ("name", "filename", "filename*") if name in params}


def _check_name(body: bytes, name: str, field: FormField) -> str:
    """Check that no server takes the field for another one. Returns its name."""
    letters = unicodedata.normalize("NFKC", unquote(name)).casefold()
    if name != _MODEL and _NO_LETTERS.sub("", letters) == _MODEL:
        raise _build_model_error(f"the field {name[:64]!r} may be taken for 'model'")
    if name == "_charset_" and body[field.start : field.end].lower() != b"utf-8":
        raise _build_error("the form must be in UTF-8")
    return name


def _read_model(body: bytes, field: FormField) -> str:
    if len(field.params) > 1 or not _PLAIN_TEXT.fullmatch(field.content_type or "text/plain"):
        raise _build_model_error("'model' must be plain text in UTF-8, and no file")
    try:
        name = body[field.start : field.end].decode()
    except UnicodeDecodeError:
        name = ""
    if not 0 < len(name) <= _MAX_MODEL_NAME or not name.isprintable() or name != name.strip():
        raise _build_model_error(
            "'model' must be the name of a model in UTF-8, without blanks around it"
        )
    return name


def _build_error(text: str) -> MalformedRequest:
    return MalformedRequest(text, problem="form")


def _build_model_error(text: str) -> InvalidParameter:
    return InvalidParameter(text, param=_MODEL, problem="value")
