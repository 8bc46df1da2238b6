"""What the client set and the target does not carry is named, once, with its reason."""

from msgspec import Raw

from gateway.core.loss import Carry, Loss, header, losses
from gateway.core.types import (
    EmbedRequest,
    GenerateRequest,
    Logprobs,
    Sampling,
    Stopping,
    Templating,
    Tool,
)

NAMES = {"stopping.max_tokens": "max_new_tokens"}


def test_nothing_set_is_nothing_lost() -> None:
    assert losses(GenerateRequest(model="m", kind="chat"), {}, {}) == ()


def test_what_the_target_does_not_know_is_dropped_under_the_clients_name() -> None:
    request = GenerateRequest(
        model="m",
        kind="chat",
        sampling=Sampling(top_k=5, temperature=0.0),
        stopping=Stopping(max_tokens=7, stop=("x",)),
        logprobs=Logprobs(2),
        tools=(Tool("f"),),
        echo=False,
    )

    found = losses(request, {"sampling.temperature": Carry("temperature")}, NAMES)

    assert found == (
        Loss("top_k", "dropped", path="sampling.top_k"),
        Loss("max_new_tokens", "dropped", path="stopping.max_tokens"),
        Loss("stop", "dropped", path="stopping.stop"),
        Loss("tools", "dropped", path="tools"),
        Loss("top", "dropped", path="logprobs.top"),
    )


def test_a_value_outside_the_targets_range_is_clamped_and_says_so() -> None:
    carries = {"sampling.temperature": Carry("t", 0.1, 1.0)}

    def lost(temperature: float) -> tuple[Loss, ...]:
        request = GenerateRequest(
            model="m", kind="chat", sampling=Sampling(temperature=temperature)
        )
        return losses(request, carries, {})

    assert lost(0.5) == ()
    assert lost(2.0) == (Loss("temperature", "clamped", "2.0 to 1.0", "sampling.temperature"),)
    assert lost(0.0) == (Loss("temperature", "clamped", "0.0 to 0.1", "sampling.temperature"),)


def test_what_is_carried_in_part_says_how() -> None:
    request = GenerateRequest(model="m", kind="chat", stopping=Stopping(stop=("x",)))

    found = losses(request, {"stopping.stop": Carry("stop", reason="emulated")}, {})

    assert found == (Loss("stop", "emulated", path="stopping.stop"),)


def test_fields_that_nobody_knows_are_lost_unless_the_target_is_given_them() -> None:
    request = EmbedRequest(model="m", inputs=("a",), dimensions=2, extra={"foo": Raw(b"1")})

    assert losses(request, {}, {}) == (
        Loss("foo", "dropped"),
        Loss("dimensions", "dropped", path="dimensions"),
    )
    assert losses(request, {"dimensions": Carry("dimensions")}, {}, extra=True) == ()


def test_the_mode_of_a_template_is_never_lost_and_its_text_is() -> None:
    request = GenerateRequest(model="m", kind="chat", templating=Templating("raw", template="t"))

    assert losses(request, {}, {}) == (Loss("template", "dropped", path="templating.template"),)


def test_the_header_holds_nothing_a_header_may_not() -> None:
    found = (Loss("a\r\nb: ü", "dropped"), Loss("messages[0].name", "approximated"))

    assert header(found) == "a__b___=dropped,messages[0].name=approximated"
