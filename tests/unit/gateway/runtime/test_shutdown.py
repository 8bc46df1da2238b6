"""Services start in order and close in reverse; a failure does not keep others open."""

import pytest

from gateway.runtime.shutdown import Service, ServiceStack


def make_services(calls: list[str], fails_at: str = "") -> list[Service]:
    """Make three services: the second is asynchronous, the last has no start."""

    def note(call: str) -> None:
        calls.append(call)
        if call == fails_at:
            raise OSError(call)

    async def note_later(call: str) -> None:
        note(call)

    return [
        Service(lambda: note("close a"), lambda: note("start a")),
        Service(lambda: note_later("close b"), lambda: note_later("start b")),
        Service(lambda: note("close c")),
    ]


async def test_services_start_in_order_and_close_in_reverse() -> None:
    calls: list[str] = []
    stack = ServiceStack(make_services(calls))
    await stack.start()

    await stack.aclose()

    assert calls == ["start a", "start b", "close c", "close b", "close a"]


@pytest.mark.parametrize("failure", ["start a", "start b"])
async def test_services_all_close_after_a_start_that_failed(failure: str) -> None:
    calls: list[str] = []
    stack = ServiceStack(make_services(calls, failure))
    with pytest.raises(OSError, match=failure):
        await stack.start()

    await stack.aclose()
    assert calls[-3:] == ["close c", "close b", "close a"]


@pytest.mark.parametrize("failure", ["close c", "close b", "close a"])
async def test_services_all_close_although_one_fails_to(failure: str) -> None:
    calls: list[str] = []
    stack = ServiceStack(make_services(calls, failure))

    with pytest.raises(OSError, match=failure):
        await stack.aclose()
    assert calls == ["close c", "close b", "close a"]
