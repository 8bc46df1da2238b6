"""The ids of the tool calls of one response: each call has its own."""


class CallIds:
    """Keeps a worker's ids apart. An id that is missing or used becomes a new one."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def claim(self, wire_id: str | None, choice: int, call: int) -> str:
        """The id of a call, from the worker's; ``choice`` and ``call`` are its place."""
        claimed = wire_id or f"call_{choice}_{call}"
        number = 0
        while claimed in self._used:
            number += 1
            claimed = f"call_{choice}_{call}" + (f"_{number}" if number > 1 else "")
        self._used.add(claimed)
        return claimed
