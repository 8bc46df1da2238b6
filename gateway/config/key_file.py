"""Reads a file of API keys: JSON Lines, i.e. one JSON object a line, with the fields of ``keys``.

A file may have 100,000 lines. A line is decoded as plain JSON, and again by ``ConfigDecoder`` only
if that fails or an issue has to be located.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec.inspect
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from gateway.config.decoder import ConfigDecoder, SourceLocation
from gateway.config.errors import (
    DOCUMENT_START,
    MAX_ISSUES,
    ConfigError,
    ConfigIssue,
    ConfigPath,
    IssueCollector,
    SourcePosition,
)
from gateway.config.schema import ApiKeyConfig, KeyRateLimitConfig
from gateway.config.yaml_reader import MAX_FILE_SIZE, compose_yaml, decode_utf8
from protocols.core.json_text import JsonDecoder, decode_json
from protocols.core.units import NonEmptyStr, parse_name, parse_sha256

_KEY_TYPE: Final = msgspec.inspect.type_info(ApiKeyConfig)
_NO_LIMITS: Final = Raw(b"null")


class _PlainKey(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The fields of ``ApiKeyConfig``, before names, digests and limits are parsed."""

    name: str
    sha256: str
    models: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)] | None = None
    protocol: NonEmptyStr | None = None
    tags: tuple[str, ...] = ()
    explain: bool = False
    limits: Raw = _NO_LIMITS
    feedback: bool = False
    feedback_on_all_keys: bool = False


_DECODER: Final = JsonDecoder(_PlainKey)


class KeyFile:
    """The keys of a file. ``keys`` has UNSET for each line that can't be read.

    ``first_number`` is the number of the file's first key among all keys of the configuration.
    """

    def __init__(
        self, filename: str, text: str, env: Mapping[str, str], first_number: int = 0
    ) -> None:
        self.filename = filename
        self.first_number = first_number
        self.issues: list[ConfigIssue] = []
        self._env = env
        self._lines = [
            (number, line)
            for number, line in enumerate(text.split("\n"), 1)
            if line and not line.isspace()
        ]
        self._limits: dict[bytes, KeyRateLimitConfig | None] = {}
        """By their text: most keys of a file share a few."""
        self.keys = tuple(self._read_keys())
        if not self.keys:
            message = "the file has no key; add one, or remove keys_file"
            self.issues.append(ConfigIssue(1, 1, message, file=filename))

    def get_line_number(self, index: int) -> int:
        """The line of a key."""
        return self._lines[index][0]

    def locate(self, index: int, path: ConfigPath) -> SourceLocation:
        """The location of a key's value at ``path``, or of the nearest value around it."""
        number, _ = self._lines[index]
        _, locations = self._decode_line(index, IssueCollector(self.filename))
        while path not in locations:
            path = path[:-1]
        location = locations[path]
        return SourceLocation(
            _move_to_line(location.value_position, number),
            location.key_position and _move_to_line(location.key_position, number),
            location.raw_text,
        )

    def _read_keys(self) -> list[ApiKeyConfig | UnsetType]:
        keys: list[ApiKeyConfig | UnsetType] = []
        for index in range(len(self._lines)):
            if len(self.issues) >= MAX_ISSUES:
                break
            key = self._decode_plain_line(index)
            keys.append(self._report_line(index) if key is None else key)
        return keys

    def _decode_plain_line(self, index: int) -> ApiKeyConfig | None:
        """The key of a line; None if ``ConfigDecoder`` has to decode it."""
        _, line = self._lines[index]
        if "$" in line:  # may be an environment variable
            return None
        try:
            plain = _DECODER.decode(line)
            limits = self._decode_limits(plain.limits, index)
            return ApiKeyConfig(
                name=parse_name(plain.name),
                sha256=parse_sha256(plain.sha256),
                models=plain.models,
                protocol=plain.protocol,
                tags=tuple(map(parse_name, plain.tags)),
                explain=plain.explain,
                limits=limits,
                feedback=plain.feedback,
                feedback_on_all_keys=plain.feedback_on_all_keys,
            )
        except ValueError:  # that of msgspec is one, too
            return None

    def _decode_limits(self, limits: Raw, index: int) -> KeyRateLimitConfig | None:
        """The limits of a line. Raises ValueError if they have an issue."""
        text = bytes(limits)
        if text not in self._limits:
            collector = IssueCollector(self.filename)
            key, _ = self._decode_line(index, collector)
            if collector.issues:
                raise ValueError
            self._limits[text] = key.limits
        return self._limits[text]

    def _report_line(self, index: int) -> ApiKeyConfig | UnsetType:
        """Decode a line, and report its issues."""
        number, _ = self._lines[index]
        collector = IssueCollector(self.filename)
        key, _ = self._decode_line(index, collector)
        self.issues += (
            replace(issue, line=number, file=self.filename) for issue in collector.issues
        )
        return UNSET if collector.issues else key

    def _decode_line(
        self, index: int, collector: IssueCollector
    ) -> tuple[Any, Mapping[ConfigPath, SourceLocation]]:
        """The key of a line and the locations of its values; the line counts as a document."""
        _, line = self._lines[index]
        decoder = ConfigDecoder(collector, self._env)
        try:
            decode_json(line)
        except msgspec.DecodeError as error:
            collector.add(DOCUMENT_START, f"the line is not a JSON object: {error}")
            return UNSET, {(): SourceLocation(DOCUMENT_START)}
        try:
            root = compose_yaml(line, collector)  # JSON is YAML, and its nodes have positions
        except ConfigError:  # the collector has its issue
            return UNSET, {(): SourceLocation(DOCUMENT_START)}
        return decoder.decode_document(root, _KEY_TYPE), decoder.locations


def _move_to_line(position: SourcePosition, number: int) -> SourcePosition:
    return SourcePosition(number, position.column)


def read_key_file(filename: str, env: Mapping[str, str], first_number: int) -> KeyFile:
    """Read a file of keys. Raises OSError, and ConfigError for a file too large or not UTF-8."""
    with Path(filename).open("rb") as file:
        text = decode_utf8(file.read(MAX_FILE_SIZE + 1), filename)
    return KeyFile(filename, text, env, first_number)
