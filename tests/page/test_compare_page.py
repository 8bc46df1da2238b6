"""The report of compare as a page, of recordings with hostile texts, in a real browser."""

import random
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, expect

from gateway.evidence.recordings import compare
from gateway.observability.recording import (
    RecordedAnswer,
    RecordedChoice,
    RecordedLoss,
    RecordedRequest,
    RecordedTiming,
    RecordedToolCall,
    RecordedUsage,
)
from gateway.tools.compare.page import render_page

HOSTILE: Final = [
    "<script>window.hit = 1</script>",
    "\"><img src=x onerror='window.hit = 2'>",
    "'><svg onload='window.hit = 3'></svg>",
    "</pre></div></main><h1>other page</h1><iframe src='javascript:parent.hit = 4'></iframe>",
    "</style><style>main { display: none }</style><meta http-equiv=refresh content='0;url=//x'>",
    "&lt;script&gt; &amp;quot; &#60;b&#62;",
    "\u202ereversed\u2066 \x00 \x1b[2J \ud800 \ufeff \U0001f469\u200d\U0001f4bb",
    "]]><![CDATA[ <!-- ${7*7} {{7*7}} javascript:window.hit=5",
]


def build_side(text: str, *, is_replay: bool) -> list[RecordedRequest]:
    """Requests with this text in all that a client or a worker chooses."""
    rng = random.Random(1)
    choice = RecordedChoice(
        text=text if is_replay else "other",
        tool_calls=[RecordedToolCall(text, text)],
        finish_reason="eos",
    )
    return [
        RecordedRequest(
            id=f"x{text}{number}" if is_replay else f"{text}{number}",
            replay_of=f"{text}{number}" if is_replay else "",
            at=float(number),
            status=400 if number == 1 else 200,
            outcome="client_error" if number == 1 else "ok",
            error=text if number == 1 else "",
            model=text,
            key=text,
            headers={"x-title": text},
            request={"messages": [{"role": "user", "content": text}], "user": text},
            answer=RecordedAnswer([choice]),
            losses=[RecordedLoss(text, text)],
            usage=RecordedUsage(9, 5, "worker"),
            timing=RecordedTiming(first_token=rng.random(), duration=1.0 + rng.random()),
        )
        for number in range(30)
    ]


@pytest.mark.parametrize("text", HOSTILE)
def test_page_of_hostile_recordings_runs_and_loads_nothing(
    browser: Browser, tmp_path: Path, text: str
) -> None:
    report = compare(
        (text, f"b {text}"), build_side(text, is_replay=False), build_side(text, is_replay=True)
    )
    file = tmp_path / "report.html"
    file.write_text(render_page(report), "utf-8")

    with browser.new_context() as context:
        page, urls, messages = context.new_page(), list[str](), list[str]()
        page.on("request", lambda request: urls.append(request.url))
        page.on("console", lambda message: messages.append(message.text))
        page.goto(file.as_uri())

        expect(page.get_by_role("heading", level=1)).to_have_count(1)
        expect(page.get_by_role("heading", name="Examples")).to_be_visible()
        assert page.evaluate("window.hit") is None
        assert page.locator("script, img, iframe, link, a, form, object, embed").count() == 0
        assert page.locator("body > main").count() == page.locator("body > *").count() == 1
        assert page.locator("pre").count() >= 3
        if text.isprintable():
            assert any(text in shown for shown in page.locator("pre").all_text_contents())
        assert (urls, messages) == ([file.as_uri()], [])
