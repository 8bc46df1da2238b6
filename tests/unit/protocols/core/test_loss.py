"""Each parameter that the client set and the target lacks is reported once, with its reason."""

from msgspec import Raw

from protocols.core.loss import (
    MAX_NAME,
    MAX_REPORTED,
    LostHeader,
    ParameterSupport,
    UnsupportedParameter,
    build_loss_headers,
    find_lost_headers,
    find_lost_query,
    find_unsupported_parameters,
    format_loss_header,
    is_full,
    limit_losses,
    list_names,
)
from protocols.core.request import (
    EmbeddingRequest,
    GenerationRequest,
    JsonSchemaFormat,
    LogprobsOptions,
    Message,
    PromptOptions,
    SamplingParams,
    StopConditions,
    Tool,
)
from protocols.core.request_headers import RequestHeaders

NAMES = {"stopping.max_tokens": "max_new_tokens"}


def test_request_without_parameters_has_no_losses() -> None:
    assert find_unsupported_parameters(GenerationRequest(model="m", kind="chat"), {}, {}) == ()


def test_unsupported_parameters_are_dropped_with_the_client_field_name() -> None:
    request = GenerationRequest(
        model="m",
        kind="chat",
        sampling=SamplingParams(top_k=5, temperature=0.0),
        stopping=StopConditions(max_tokens=7, stop=("x",)),
        logprobs=LogprobsOptions(2),
        tools=(Tool("f"),),
        echo=False,
    )

    unsupported = find_unsupported_parameters(
        request, {"sampling.temperature": ParameterSupport("temperature")}, NAMES
    )

    assert unsupported == (
        UnsupportedParameter("top_k", "dropped", path="sampling.top_k"),
        UnsupportedParameter("max_new_tokens", "dropped", path="stopping.max_tokens"),
        UnsupportedParameter("stop", "dropped", path="stopping.stop"),
        UnsupportedParameter("tools", "dropped", path="tools"),
        UnsupportedParameter("top", "dropped", path="logprobs.top"),
    )


def test_value_outside_the_supported_range_is_clamped_and_reported() -> None:
    carries = {"sampling.temperature": ParameterSupport("t", 0.1, 1.0)}

    def lost(temperature: float) -> tuple[UnsupportedParameter, ...]:
        request = GenerationRequest(
            model="m", kind="chat", sampling=SamplingParams(temperature=temperature)
        )
        return find_unsupported_parameters(request, carries, {})

    assert lost(0.5) == ()
    assert lost(2.0) == (
        UnsupportedParameter("temperature", "clamped", "2.0 to 1.0", "sampling.temperature"),
    )
    assert lost(0.0) == (
        UnsupportedParameter("temperature", "clamped", "0.0 to 0.1", "sampling.temperature"),
    )


def test_partially_supported_parameter_has_its_reason() -> None:
    request = GenerationRequest(model="m", kind="chat", stopping=StopConditions(stop=("x",)))

    unsupported = find_unsupported_parameters(
        request, {"stopping.stop": ParameterSupport("stop", reason="emulated")}, {}
    )

    assert unsupported == (UnsupportedParameter("stop", "emulated", path="stopping.stop"),)


def test_extra_fields_are_lost_unless_the_target_accepts_them() -> None:
    request = EmbeddingRequest(model="m", inputs=("a",), dimensions=2, extra={"foo": Raw(b"1")})

    assert find_unsupported_parameters(request, {}, {}) == (
        UnsupportedParameter("foo", "dropped"),
        UnsupportedParameter("dimensions", "dropped", path="dimensions"),
    )
    assert (
        find_unsupported_parameters(
            request, {"dimensions": ParameterSupport("dimensions")}, {}, extra=True
        )
        == ()
    )


def test_template_text_is_reported_as_lost_and_its_mode_is_not() -> None:
    request = GenerationRequest(
        model="m", kind="chat", templating=PromptOptions("raw", template="t")
    )

    assert find_unsupported_parameters(request, {}, {}) == (
        UnsupportedParameter("template", "dropped", path="templating.template"),
    )


def test_message_that_says_itself_that_it_is_continued_is_named() -> None:
    names = dict.fromkeys(
        ("templating.continue_final", "templating.add_generation_prompt"), "messages"
    )
    request = GenerationRequest(
        model="m",
        kind="chat",
        messages=(Message("user"), Message("assistant")),
        templating=PromptOptions(continue_final=True, add_generation_prompt=False),
    )

    losses = find_unsupported_parameters(request, {}, names)

    assert format_loss_header(losses) == "messages[1]=approximated"
    assert limit_losses(losses) == losses[:1]


def test_loss_header_is_sanitized() -> None:
    losses = (
        UnsupportedParameter("a\r\nb: ü", "dropped"),
        UnsupportedParameter("messages[0].name", "approximated"),
    )

    assert format_loss_header(losses) == "a__b___=dropped,messages[0].name=approximated"
    assert build_loss_headers(losses) == (("x-interlingua-loss", format_loss_header(losses)),)
    assert build_loss_headers(()) == ()


def test_loss_header_names_a_field_once_for_each_reason() -> None:
    losses = (
        UnsupportedParameter("messages", "dropped", path="templating.continue_final"),
        UnsupportedParameter("messages", "dropped", path="templating.add_generation_prompt"),
        UnsupportedParameter("messages", "approximated", path="messages"),
    )

    assert format_loss_header(losses) == "messages=dropped,messages=approximated"


def test_unknown_parameters_of_a_query_are_reported_once() -> None:
    query = "beta=true&later=1&&a%20b&later=2&="

    assert find_lost_query(query, frozenset({"beta"})) == (
        UnsupportedParameter("query.later", "dropped"),
        UnsupportedParameter("query.a b", "dropped"),
    )


def test_names_that_others_chose_are_cut_and_counted_in_a_report() -> None:
    images = UnsupportedParameter("messages", "dropped", "images", "messages")
    names = [UnsupportedParameter(f"{i:03}{'x' * 10_000}", "dropped") for i in range(MAX_REPORTED)]
    more = UnsupportedParameter("y", "dropped")

    report = limit_losses([*names, *names, more, images])

    assert [one.field[:3] for one in report[:MAX_REPORTED]] == [one.field[:3] for one in names]
    assert {len(one.field) for one in report[:MAX_REPORTED]} == {MAX_NAME}
    assert report[MAX_REPORTED:] == (
        images,
        UnsupportedParameter("further", "dropped", "names after the first 100"),
    )


def test_report_looks_at_no_more_names_than_it_lists() -> None:
    """An event of a worker may have 190,000 unknown elements."""
    names = (f"element[{number}]" for number in range(1000))

    report = limit_losses(list_names(names, "approximated"))

    assert len(report) == MAX_REPORTED + 1
    assert is_full(report)
    assert {one.reason for one in report[:-1]} == {"approximated"}
    assert next(names) == f"element[{MAX_REPORTED + 1}]"
    assert not is_full(limit_losses(list_names(["x" * 1000, "y"])))


def test_a_report_that_is_full_does_not_grow() -> None:
    report = limit_losses(UnsupportedParameter(str(i), "dropped") for i in range(500))

    later = limit_losses([UnsupportedParameter("later", "dropped"), report[0]], report)

    assert later == report
    assert is_full(report)
    assert not is_full(report[:-1])


def test_headers_that_workers_do_not_get_are_reported_and_never_a_reason_to_refuse() -> None:
    table = RequestHeaders(("own-",), {"own-sent": "forwarded", "own-seen": "handled"})
    headers = {"own-sent": "1", "own-seen": "1", "own-new": "1", "cookie": "1", "x-foo": "1"}

    assert find_lost_headers(headers, table, (("Own-Sent", "1"),), frozenset({"x-foo"})) == (
        LostHeader("header.own-new", "dropped"),
    )
    assert [one.field for one in find_lost_headers(headers, table, ())] == [
        "header.own-sent",
        "header.own-new",
        "header.x-foo",
    ]


def test_description_of_a_schema_is_lost_unless_the_target_gets_it() -> None:
    output = JsonSchemaFormat(Raw(b"{}"), description="of a city")
    request = GenerationRequest(model="m", kind="chat", output=output)
    names = {"output": "text.format"}

    for is_sent, lost in ((True, ()), (False, ("text.format.description",))):
        support = {"output": ParameterSupport("format", takes_description=is_sent)}
        losses = find_unsupported_parameters(request, support, names)
        assert tuple(one.field for one in losses) == lost

    [loss] = find_unsupported_parameters(request, {"output": ParameterSupport("format")}, {})
    assert loss.field == "response_format.json_schema.description"
