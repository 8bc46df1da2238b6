"""The progress of loading a model: a line that changes on a terminal, and log lines elsewhere."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_ENGINE_LOGGER: Final = "backends.torch"


class _LoadingFilter(logging.Filter):
    """Keeps errors back, and the engine's other lines if ``is_quiet``.

    The command prints the error with which it ends; ``log_others`` logs those of other models.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        super().__init__()
        self._is_quiet = is_quiet
        self._errors: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging's Filter."""
        if record.name.startswith(_ENGINE_LOGGER):
            if record.levelno >= logging.ERROR:
                if record not in self._errors:  # each handler asks
                    self._errors.append(record)
                return False
            if self._is_quiet and record.levelno == logging.INFO:
                return False
        return True

    def log_others(self, printed: str) -> None:
        """Log the errors that were kept back, except the one whose text the command prints."""
        for record in self._errors:
            if not printed or printed not in record.getMessage():
                logging.getLogger(record.name).handle(record)


@contextmanager
def show_loading(*, enabled: bool, use_status_line: bool) -> Iterator[Callable[[str], None]]:
    """Show the progress of local models that are being loaded, if ``enabled``.

    ``use_status_line``: a terminal gets a line with what the yielded function was called with last,
    and not the log's lines.
    """
    if not enabled:
        yield _show_nowhere
    elif not (use_status_line and sys.stderr.isatty()):
        with _filter_log(_LoadingFilter(is_quiet=False)):
            yield _show_nowhere
    else:
        from rich.console import Console  # noqa: PLC0415 - only for a terminal
        from rich.markup import escape  # noqa: PLC0415 - as above

        quiet = _LoadingFilter(is_quiet=True)
        with Console(stderr=True).status("loading") as status, _filter_log(quiet):
            yield lambda text: status.update(escape(f"loading {text}"))


def _show_nowhere(text: str) -> None:
    """Do nothing: the log's lines tell the progress."""
    del text


@contextmanager
def _filter_log(log_filter: _LoadingFilter) -> Iterator[None]:
    handlers = logging.getLogger().handlers
    for handler in handlers:
        handler.addFilter(log_filter)
    printed = ""
    try:
        yield
    except Exception as error:
        printed = str(error)
        raise
    finally:
        for handler in handlers:
            handler.removeFilter(log_filter)
        log_filter.log_others(printed)
