"""The web UI in a real browser, with a gateway whose listeners require keys."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from protocols import PROTOCOLS
from tests.page.conftest import ADMIN_KEY, CANARY, KEY, Gateway, open_view, read_response

VIEWS = ["Status", "Requests", "Experiments", "Playground", "Configuration", "API"]
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
_INTERMEDIATE = """
const [told, answer] = [[], document.querySelector('[role=log]')];
new MutationObserver(() => told.push(answer.textContent)).observe(answer, {childList: true});
window.told = told;
"""

_NOT_REACHED = """
[...document.querySelectorAll("a, button, input, select, textarea, summary, [tabindex='0']")]
    .filter(it => it.checkVisibility() && !it.disabled && !it.dataset.seen)
    .map(it => it.outerHTML)
"""


def open_playground(page: Page, model: str = "chat@1", *, protocol: str = "openai · chat") -> None:
    open_view(page, "Playground")
    page.get_by_label("Protocol").select_option(protocol)
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("combobox", name="Model", exact=True).fill(model)


def wait_for_texts(page: Page, least: int) -> None:
    """Wait until the response was shown with so many different texts."""
    until = time.monotonic() + 30
    while len(set(page.evaluate("window.told"))) < least:
        assert time.monotonic() < until, page.evaluate("window.told")
        page.wait_for_timeout(50)


# --- the playground ------------------------------------------------------------------------------


def test_playground_shows_a_stream_and_stops_the_request(page: Page, gateway: Gateway) -> None:
    open_playground(page, "endless")
    page.evaluate(_INTERMEDIATE)
    page.get_by_role("button", name="Send").click()
    wait_for_texts(page, 5)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("stopped")).to_be_visible()

    texts = list(dict.fromkeys(page.evaluate("window.told")))
    assert texts == sorted(texts, key=len)
    assert set("".join(texts)) == {"a"}

    open_view(page, "Requests")
    expect(page.get_by_text("No running requests")).to_be_visible()
    running = httpx.get(f"{gateway.admin}/-/requests", headers=ADMIN, timeout=30)
    assert running.json() == {"requests": []}


def test_playground_shows_the_raw_stream_events(page: Page) -> None:
    open_playground(page)
    page.get_by_role("button", name="Send").click()

    assert read_response(page) == "one two three four five"

    events = page.get_by_role("group", name="Model: events").locator("pre").all_text_contents()
    assert len(events) == 8
    assert events[-1].endswith("data: [DONE]")

    figures = page.get_by_text("in total").text_content() or ""
    assert re.match(r"status 200 · first token \S+ \w+ · [\d.,]+ tokens/s · 5 chunks · ", figures)


def test_playground_compares_two_models(page: Page) -> None:
    open_playground(page)
    page.get_by_label("Compare two models").check()
    page.get_by_role("combobox", name="Second model").fill("chat@2")

    page.get_by_role("button", name="Send").click()

    assert read_response(page) == "one two three four five"
    assert read_response(page, "Second model") == "uno dos tres"


def test_playground_supports_every_protocol_streamed_and_unary(page: Page) -> None:
    open_view(page, "Playground")
    options = page.get_by_label("Protocol").locator("option")
    expect(options).not_to_have_count(0)
    protocols = options.all_text_contents()
    page.get_by_label("Max tokens").fill("2")
    page.get_by_label("Temperature").fill("0.5")

    spoken = {protocol.split(" · ")[0] for protocol in protocols}

    assert spoken == PROTOCOLS.keys()

    for stream in (True, False):
        page.get_by_label("Stream").set_checked(stream)
        for protocol in protocols:
            open_playground(page, "plain", protocol=protocol)
            page.get_by_role("button", name="Send").click()
            assert (protocol, read_response(page)) == (protocol, "uno dos")


def test_protocols_are_loaded_again_if_a_listener_did_not_describe_them(page: Page) -> None:
    answers = ["{}"]

    def answer_once(route: Route) -> None:
        if answers:
            route.fulfill(body=answers.pop(), content_type="application/json")
        else:
            route.continue_()

    page.route("**/openapi.json", answer_once)
    open_view(page, "Playground")

    expect(page.get_by_label("Protocol").locator("option")).not_to_have_count(0, timeout=30_000)
    assert not answers


def test_curl_and_python_snippets_send_the_same_request(
    page: Page, gateway: Gateway, tmp_path: Path
) -> None:
    open_playground(page, "chat@2")
    page.get_by_label("Prompt").fill('it\'s "so" $HOME `id` \\ 😀 é\nsecond line')
    page.get_by_label("Stream").uncheck()
    page.get_by_role("button", name="Send").click()
    read_response(page)
    page.get_by_text("curl", exact=True).click()
    page.get_by_text("Python", exact=True).click()

    shell, python = page.locator("details pre").all_text_contents()

    assert f"'{gateway.client}/v1/chat/completions'" in shell

    script = tmp_path / "ask.py"
    script.write_text(python)
    for command, output in (
        (["bash", "-c", shell], b'"content":"uno dos tres"'),
        ([sys.executable, str(script)], b"uno dos tres\n"),
    ):
        done = subprocess.run(
            command,
            env=os.environ | {"API_KEY": KEY},
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert output in done.stdout


# --- escaping -------------------------------------------------------------------------------------


def test_displayed_text_is_never_rendered_as_html(page: Page) -> None:
    """This holds for responses, names of models, and names in errors."""
    open_playground(page, CANARY)
    page.get_by_role("button", name="Send").click()
    assert read_response(page) == CANARY

    open_playground(page, f"chat@{CANARY}", protocol="triton · generate")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert").first).to_contain_text("onerror")
    open_view(page, "Status")
    expect(page.get_by_role("cell", name=CANARY).first).to_be_visible()
    open_view(page, "Configuration")
    expect(page.locator("pre")).to_contain_text("onerror")

    assert page.evaluate("window.hit") is None
    assert page.locator("main img, main script").count() == 0


def test_ids_and_models_of_requests_are_never_rendered_as_html(
    page: Page, gateway: Gateway
) -> None:
    body = {"model": CANARY, "messages": [{"role": "user", "content": CANARY}]}
    headers = {"Authorization": f"Bearer {KEY}", "x-interlingua-explain": "1"}
    headers["x-request-id"] = "<b>hostile</b>"
    httpx.post(f"{gateway.client}/v1/chat/completions", json=body, headers=headers, timeout=30)
    open_view(page, "Requests")
    expect(page.get_by_role("cell", name=CANARY).first).to_be_visible()
    page.get_by_label("Model").select_option(f"{CANARY}@1")
    page.get_by_role("link", name="details of request <b>hostile</b>").click()
    expect(page.get_by_role("dialog")).to_contain_text("Request <b>hostile</b>")

    expect(page.get_by_role("dialog")).to_contain_text(f"requested as {CANARY}")

    assert page.evaluate("window.hit") is None
    assert page.locator("main img, main script, main b").count() == 0


def test_controls_in_names_are_shown_as_escapes(page: Page, gateway: Gateway) -> None:
    """A change of the direction would reverse what stands behind it."""
    body = {"model": "gpt\u202e4\x00\x1b[2J", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {KEY}", "x-interlingua-explain": "1"}
    headers["x-request-id"] = "controls"
    httpx.post(f"{gateway.client}/v1/chat/completions", json=body, headers=headers, timeout=30)
    open_view(page, "Requests")
    page.get_by_role("link", name="details of request controls").click()

    expect(page.get_by_role("dialog")).to_contain_text(r"gpt\u202e4\u0000\u001b[2J")


def test_page_loads_only_own_resources_and_has_a_strict_csp(
    browser: Browser, gateway: Gateway
) -> None:
    context = browser.new_context()
    new_page, urls = context.new_page(), list[str]()
    new_page.on("request", lambda request: urls.append(request.url))
    response = new_page.goto(gateway.admin)
    new_page.get_by_label("Admin key").wait_for()

    with pytest.raises(Exception, match="TrustedHTML"):
        new_page.evaluate("document.body.innerHTML = 'x'")

    context.close()

    assert response is not None

    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'self'; ")
    assert all(url.startswith(gateway.admin) for url in urls)


def test_admin_key_is_requested_and_kept_only_in_the_tab(
    browser: Browser, gateway: Gateway
) -> None:
    context = browser.new_context()
    new_page = context.new_page()
    new_page.goto(gateway.admin)
    new_page.get_by_label("Admin key").fill("wrong")
    new_page.keyboard.press("Enter")
    expect(new_page.get_by_role("status")).to_have_text("Admin key required")
    new_page.get_by_label("Admin key").fill(ADMIN_KEY)
    new_page.keyboard.press("Enter")
    expect(new_page.get_by_role("cell", name="endless").first).to_be_visible()
    other = context.new_page()
    other.goto(gateway.admin)
    expect(other.get_by_label("Admin key")).to_be_visible()
    context.close()


# --- requests and configuration -------------------------------------------------------------------


@contextmanager
def run_endless_client(gateway: Gateway) -> Iterator[list[str]]:
    """Read an endless response; yield its lines, which are complete at the end."""
    lines: list[str] = []

    def read() -> None:
        body = {"model": "endless", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        url, key = f"{gateway.client}/v1/chat/completions", {"Authorization": f"Bearer {KEY}"}
        with httpx.stream("POST", url, json=body, headers=key, timeout=30) as response:
            lines.extend(response.iter_lines())

    thread = threading.Thread(target=read)
    thread.start()
    yield lines
    thread.join(30)
    assert not thread.is_alive()


def test_running_request_is_listed_and_cancelled(page: Page, gateway: Gateway) -> None:
    open_view(page, "Requests")
    with run_endless_client(gateway) as lines:
        row = page.get_by_role("row").filter(has_text="streaming")
        expect(row).to_contain_text("tester")
        row.get_by_role("button").click()
        expect(page.get_by_text("No running requests")).to_be_visible()

    assert "the request was stopped" in [line for line in lines if line][-1]


def test_configuration_view_drains_and_reloads(page: Page, gateway: Gateway) -> None:
    open_view(page, "Configuration")
    facts = page.locator("dl")
    expect(facts).to_contain_text(": same as the active configuration")
    ready = f"{gateway.admin}/-/ready"
    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_role("dialog", name="Drain this gateway?").get_by_text("Cancel").click()

    assert httpx.get(ready, timeout=30).status_code == 200

    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_role("button", name="Start draining").click()
    expect(page.get_by_text("Draining: the readiness check fails.")).to_be_visible()

    assert httpx.get(ready, timeout=30).status_code == 503

    page.get_by_role("button", name="Stop draining").click()
    expect(page.get_by_role("button", name="Drain", exact=True)).to_be_visible()
    assert httpx.get(ready, timeout=30).status_code == 200

    text = gateway.file.read_text()
    gateway.file.write_text(text + "nothing: known\n")
    page.get_by_role("button", name="Reload").click()
    expect(page.get_by_role("alert").filter(has_text="'nothing'")).to_be_visible()
    expect(facts).to_contain_text("differs from the active configuration")
    gateway.file.write_text(text)
    page.get_by_role("button", name="Reload").click()
    expect(page.get_by_text("Configuration reloaded.")).to_be_visible()
    shown = page.locator("pre").text_content() or ""

    assert '"***"' in shown
    assert ADMIN_KEY not in shown


def test_fields_beside_each_other_are_of_one_height(page: Page) -> None:
    """A select and a field for a search, of which browsers draw the second higher."""
    open_view(page, "API")
    fields = page.locator(".fields > label:not(.check) > :is(input, select):visible")
    expect(fields.nth(1)).to_be_visible()
    boxes = [box for field in fields.all() if (box := field.bounding_box())]

    assert len(boxes) > 1
    assert len({box["height"] for box in boxes}) == 1
    assert boxes[0]["y"] == boxes[1]["y"]


def test_api_view_shows_the_openapi_description(page: Page) -> None:
    open_view(page, "API")
    page.get_by_label("Search").fill("triton")
    path = page.locator("summary", has_text="/v2/models/{model}/generate").first
    path.click()
    expect(page.locator("code:text-is('text_input')").first).to_be_visible()
    page.get_by_label("Search").fill("/v1/chat/completions")
    expect(path).to_be_hidden()
    page.locator("summary", has_text="/v1/chat/completions").first.click()
    page.locator("summary:visible", has_text="messages").first.click()
    page.locator("summary", has_text="items:").first.click()
    expect(page.get_by_text("one of: object with role, content").first).to_be_visible()


def test_finished_requests_are_filtered_and_open_their_explanation(
    page: Page, gateway: Gateway
) -> None:
    body = {"model": "plain", "messages": [{"role": "user", "content": "canary"}]}
    url = f"{gateway.client}/v1/chat/completions"
    key = {"Authorization": f"Bearer {KEY}"}
    explained = key | {"x-interlingua-explain": "1", "x-request-id": "explained/1"}
    httpx.post(url, json=body, headers=explained, timeout=30)
    httpx.post(url, json=body | {"model": "chat@9"}, headers=key, timeout=30)
    open_view(page, "Requests")
    expect(page.get_by_role("row").filter(has_text="VersionNotFound").first).to_be_visible()
    page.get_by_label("Status").select_option("failed")
    expect(page.get_by_role("row").filter(has_text="plain@1")).to_have_count(0)
    page.get_by_label("Status").select_option("ok")
    page.get_by_label("Model").select_option("plain@1")
    page.get_by_label("Key").select_option("tester")
    expect(page.get_by_role("row").filter(has_text="VersionNotFound")).to_have_count(0)

    page.get_by_role("link", name="details of request explained/1").click()
    details = page.get_by_role("dialog")
    expect(details).to_contain_text("plain@1 by backend other")
    expect(details).to_contain_text("target     plain@1: other, as plain")
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()
    expect(page).to_have_url(re.compile(r"#requests$"))


def test_conversation_continues_from_a_response(page: Page) -> None:
    open_playground(page, "plain")
    page.get_by_label("System").fill("Be brief.")
    page.get_by_label("Prompt").fill("first")
    page.get_by_role("button", name="Send").click()
    read_response(page)
    page.get_by_role("button", name="Continue from this response").click()
    page.get_by_label("Prompt").fill("second")
    page.get_by_role("button", name="Send").click()
    read_response(page)
    page.get_by_text("curl", exact=True).click()
    command = page.locator("details pre").first.text_content() or ""
    body = json.loads(shlex.split(command)[-1])

    assert [(one["role"], one["content"]) for one in body["messages"]] == [
        ("system", "Be brief."),
        ("user", "first"),
        ("assistant", "uno dos tres"),
        ("user", "second"),
    ]

    page.get_by_label("Protocol").select_option("anthropic · messages")
    page.get_by_role("button", name="Send").click()
    read_response(page)
    command = page.locator("details pre").first.text_content() or ""
    body = json.loads(shlex.split(command)[-1])

    assert body["system"] == "Be brief."
    assert [one["role"] for one in body["messages"]] == ["user", "assistant", "user"]


def test_playground_offers_public_names_first_and_shows_the_names_of_parameters(
    page: Page,
) -> None:
    open_view(page, "Playground")
    models = page.locator("datalist option")
    expect(models).not_to_have_count(0)
    options = models.evaluate_all("all => all.map(one => one.value)")

    assert options == ["chat", "plain", "endless", "distant", "chat@1", "chat@2"]
    assert page.get_by_role("combobox", name="Model", exact=True).input_value() == "chat"

    names = {"ollama · chat": "num_predict", "openai · chat": "max_tokens"}
    for protocol, name in names.items():
        page.get_by_label("Protocol").select_option(protocol)
        expect(page.locator("label", has_text="Max tokens").locator("code")).to_have_text(name)


def test_python_examples_call_the_sdk_with_the_body_that_was_sent(page: Page) -> None:
    open_view(page, "Playground")
    sdks = {
        "openai · chat": "openai",
        "anthropic · messages": "anthropic",
        "ollama · chat": "ollama",
        "ollama · generate": "ollama",
        "ovms · completion": "openai",
        "databricks · chat": "openai",
        "triton · generate": "httpx",
    }
    for protocol, sdk in sdks.items():
        open_playground(page, "plain", protocol=protocol)
        page.get_by_label("Prompt").fill('it\'s "so" \\ 😀')
        page.get_by_role("button", name="Send").click()
        read_response(page)
        shell, program = page.locator("details pre").all_text_contents()
        body = json.loads(shlex.split(shell)[-1])
        tree = ast.parse(program)
        [imported] = [
            one.module if isinstance(one, ast.ImportFrom) else one.names[0].name
            for one in tree.body
            if isinstance(one, ast.Import | ast.ImportFrom) and "os" not in ast.unparse(one)
        ]
        assert (protocol, imported) == (protocol, sdk)
        values = {
            one.arg: ast.literal_eval(one.value)
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            for one in call.keywords
            if one.arg in body
        }
        if sdk != "httpx":
            assert (protocol, values) == (protocol, body)


def test_whole_numbers_beyond_two_to_the_53_are_neither_rounded_in_docs_nor_in_requests(
    page: Page,
) -> None:
    seed = str(2**63 - 1)
    open_playground(page, "plain")
    page.get_by_label("Seed").fill(seed)
    page.get_by_role("button", name="Send").click()
    read_response(page)
    page.get_by_text("curl", exact=True).click()
    expect(page.locator("details pre").first).to_contain_text(f'"seed":{seed},')
    open_view(page, "API")
    page.get_by_label("Search").fill("/v1/chat/completions")
    page.locator("summary:visible", has_text="/v1/chat/completions").first.click()

    expect(page.get_by_text(f"to {seed}").first).to_be_attached()

    assert page.get_by_text("9223372036854776000").count() == 0


def test_api_view_sends_a_request_and_shows_the_response(page: Page) -> None:
    open_view(page, "API")
    page.get_by_label("Search").fill("/v2/models/{model}/generate")
    page.locator("summary:visible", has_text="/v2/models/{model}/generate").first.click()
    form = page.get_by_role("region", name="Try POST /v2/models/{model}/generate", exact=True)
    form.get_by_label("model").fill("plain")
    form.get_by_label("API key").fill(KEY)
    form.get_by_label("Body").fill('{"text_input": "x", "parameters": {}}')
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_label("Response")).to_contain_text("uno dos tres")
    expect(form.get_by_role("status")).to_contain_text("status 200")


def test_configuration_shows_the_changes_in_the_file(page: Page, gateway: Gateway) -> None:
    open_view(page, "Configuration")
    lines = page.locator("pre .line")
    expect(lines.filter(has_text="plain: {backend: other}")).to_have_attribute(
        "data-number", str(gateway.file.read_text().split("\n  plain: ")[0].count("\n") + 2)
    )
    text = gateway.file.read_text()
    gateway.file.write_text(text.replace("plain: {backend: other}", "plain: {backend: slow}"))
    expect(page.locator("pre .removed")).to_contain_text("plain: {backend: other}")
    expect(page.locator("pre .added")).to_contain_text("plain: {backend: slow}")
    gateway.file.write_text(text)
    expect(page.locator("pre .added")).to_have_count(0)


# --- all users ------------------------------------------------------------------------------------


def test_page_is_usable_with_the_keyboard_only(page: Page) -> None:
    open_view(page, "Playground")
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("Compare two models").check()
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.get_by_role("link", name="Skip to the view").focus()
    for _ in range(40):
        page.evaluate("document.activeElement.dataset.seen = 1")
        page.keyboard.press("Tab")

    assert page.evaluate(_NOT_REACHED) == []

    page.get_by_label("Prompt").focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")

    assert read_response(page)
    assert page.get_by_label("Prompt").input_value() == "hello\nthere"

    page.get_by_role("link", name="Status").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Models")).to_be_visible()


def test_page_fits_a_phone_screen(page: Page, gateway: Gateway) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    open_playground(page, "endless")
    page.get_by_label("Compare two models").check()
    page.get_by_role("button", name="Send").click()
    texts = {"Status": "Worker", "Requests": "streaming", "Playground": "[DONE]", "API": "/v1/"}
    texts["Experiments"] = "no usage rows"
    widths, wide_tables = {}, []

    for name in VIEWS:
        open_view(page, name)
        expect(page.locator("main")).to_contain_text(texts.get(name, "On disk"))
        widths[name] = page.evaluate("document.scrollingElement.scrollWidth")
        wide_tables += page.locator(".scroll").evaluate_all(
            "regions => regions.filter((one) => one.scrollWidth > one.clientWidth)"
            ".map((one) => one.ariaLabel)"
        )

    assert widths == dict.fromkeys(VIEWS, 360)
    assert wide_tables == []
