"""The form of log lines: text for people, JSON for programs; the same in all of our processes."""

import functools
import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Final, Literal, cast, get_args

import msgspec

LogFormat = Literal["text", "json"]
LogFormatChoice = Literal["auto", "text", "json"]

LOG_FORMAT_CHOICES: Final[tuple[LogFormatChoice, ...]] = get_args(LogFormatChoice)
LOG_FORMAT_VARIABLE: Final = "INTERLINGUA_LOG_FORMAT"
"""The environment variable by which a process passes its format on to those that it starts."""

_TEXT_FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
_TEXT_TIME: Final = "%Y-%m-%d %H:%M:%S"


_CONTROLS: Final = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def escape_controls(text: str) -> str:
    """The text with escapes of the characters that a terminal or a browser would obey.

    Those are controls except tabs and ends of lines, changes of the direction, separators of lines,
    and halves of surrogate pairs.
    """
    return text if text.isprintable() else _CONTROLS.sub(_escape_control, text)


def escape_json(text: bytes) -> bytes:
    """The same JSON document, or the same lines of such, with escapes of these characters."""
    if text.isascii() and b"\x7f" not in text:
        return text
    return escape_controls(text.decode()).encode()


def _escape_control(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def choose_log_format(choice: str) -> LogFormat:
    """The format for ``choice``; any other than text and json is that for standard error."""
    if choice in {"text", "json"}:
        return cast("LogFormat", choice)
    return "text" if sys.stderr.isatty() else "json"


def inherit_log_format(environment: Mapping[str, str]) -> LogFormat:
    """The format of the process that started this one."""
    return choose_log_format(environment.get(LOG_FORMAT_VARIABLE, "auto"))


def pass_on_log_format(log_format: LogFormat, environment: MutableMapping[str, str]) -> None:
    """Let processes that are started with this environment log in this format."""
    environment[LOG_FORMAT_VARIABLE] = log_format


def format_time(unix_seconds: float, log_format: LogFormat) -> str:
    """A time of a log line: local time in text, UTC in JSON."""
    if log_format == "json":
        second = int(unix_seconds)
        return f"{_format_second(second)}.{int((unix_seconds - second) * 1000):03d}Z"
    moment = datetime.fromtimestamp(unix_seconds).astimezone()
    return moment.strftime(_TEXT_TIME) + f".{moment.microsecond // 1000:03d}"


@functools.lru_cache(maxsize=8)
def _format_second(second: int) -> str:
    """A second in UTC; busy gateways log many lines in each."""
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class JsonLogFormatter(logging.Formatter):
    """Formats log messages as JSON objects of one line."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging's Formatter."""
        fields = {
            "time": format_time(record.created, "json"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _replace_surrogates(record.getMessage()),
        }
        if record.exc_info:
            fields["exception"] = _replace_surrogates(self.formatException(record.exc_info))
        return escape_json(msgspec.json.encode(fields)).decode()


def _replace_surrogates(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


class TextLogFormatter(logging.Formatter):
    """Formats log messages as lines of text, which no terminal obeys."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging's Formatter."""
        return escape_controls(super().format(record))


def build_formatter(log_format: LogFormat) -> logging.Formatter:
    """The formatter of log messages."""
    if log_format == "json":
        return JsonLogFormatter()
    return TextLogFormatter(_TEXT_FORMAT, _TEXT_TIME)


def configure_logging(level: int | str, log_format: LogFormat) -> None:
    """Log to standard error in this format: messages, Python's warnings, and fatal errors."""
    logging.basicConfig(level=level)
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(build_formatter(log_format))
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_fatal_error


def _log_fatal_error(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Log an error that ends the process: an excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        return
    del trace
    logging.getLogger("interlingua").critical("the process fails", exc_info=error)


def format_notice(text: str, log_format: LogFormat, level: int = logging.INFO) -> str:
    """Lines that are no log messages: as they are, or each as a JSON object."""
    if log_format == "text":
        return escape_controls(text)
    formatter = JsonLogFormatter()
    return "\n".join(
        formatter.format(
            logging.LogRecord(
                name="interlingua",
                level=level,
                pathname="",
                lineno=0,
                msg=line,
                args=None,
                exc_info=None,
            )
        )
        for line in text.splitlines()
    )
