"""The error of a request that the engine rejects."""

from backends.torch.ipc import FailureKind, RequestFailedEvent


class RequestRejectedError(Exception):
    """The request is rejected; carries the fields of a RequestFailedEvent."""

    def __init__(self, kind: FailureKind, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.failure_kind: FailureKind = kind
        self.param = param
        self.tokens: int | None = None
        self.limit: int | None = None

    def make_failed_event(self, job: int) -> RequestFailedEvent:
        """The failure as an event."""
        return RequestFailedEvent(
            job, self.failure_kind, str(self), self.param, self.tokens, self.limit
        )


def make_too_long_error(tokens: int | None, limit: int, param: str) -> RequestRejectedError:
    """The error for more tokens than the model takes; ``tokens`` is None if not counted."""
    count = f"{tokens} tokens" if tokens is not None else f"more than {limit} tokens"
    rejection = RequestRejectedError(
        "too_long", f"the prompt has {count} and the model takes {limit}", param=param
    )
    rejection.tokens, rejection.limit = tokens, limit
    return rejection
