"""Redaction: what is replaced, what is kept, and that no planted secret survives anywhere."""

from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.schema import RedactionConfig
from gateway.observability.redaction import MAX_STRING, Redactor

SECRETS: Final = {
    "email": "anna.b+work@mail.example.org",
    "phone": "+49 170 1234-567",
    "credit_card": "4111 1111 1111 1111",
    "api_key": "sk-proj-Abc123Def456Ghi789",
    "bearer": "Bearer abcdef.1234567890",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "private_key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
}


def redact(value: Any, **config: Any) -> tuple[Any, list[str]]:
    places: list[str] = []
    return Redactor(RedactionConfig(**config)).redact("request", value, places), places


@pytest.mark.parametrize("name", SECRETS)
def test_builtin_pattern_replaces_only_the_secret(name: str) -> None:
    """The text around it stays, its place is named, and a pattern that is off finds nothing."""
    text = f"before {SECRETS[name]}, after"
    value, places = redact({"a": [{"b": text}]})
    assert value == {"a": [{"b": f"before [redacted:{name}], after"}]}
    assert places == ["request.a[0].b"]
    assert redact({"a": text}, builtin=()) == ({"a": text}, [])


@pytest.mark.parametrize(
    "text",
    [
        "1 + 2 = 3, a @ b, 4111 1111 1111 1112",
        "the order 12345 of 2026-11-23 12:30:00 costs 1,000.00",
        "sk-learn and task-oriented questions about basic arithmetic",
        "a sentence of many words " * 40,
        "[1, 2] and {curly}",
    ],
)
def test_usual_text_is_kept(text: str) -> None:
    """What looks a little like a secret is not replaced."""
    assert redact({"text": text}) == ({"text": text}, [])


def test_fields_are_hidden_by_name_and_by_path() -> None:
    """A name counts at any depth and in any case; a path only from the top."""
    value, places = redact(
        {
            "Password": 1,
            "user": {"name": "x", "password": ["y"]},
            "messages": [{"name": "n", "content": "c"}, {"name": "m"}],
            "none": {"password": None},
        },
        fields=("password", "messages.*.name"),
    )
    assert value == {
        "Password": "[redacted:field]",
        "user": {"name": "x", "password": "[redacted:field]"},
        "messages": [{"name": "[redacted:field]", "content": "c"}, {"name": "[redacted:field]"}],
        "none": {"password": None},
    }
    assert places == [
        "request.Password", "request.user.password", "request.messages[0].name",
        "request.messages[1].name",
    ]  # fmt: skip


def test_json_in_strings_is_redacted_inside() -> None:
    """The arguments of a tool call are JSON text; a field in it is hidden as one outside."""
    arguments = '{"password": "hunter2", "to": "anna@example.org", "escaped": "\\u0061@b.example"}'
    value, _ = redact({"arguments": arguments}, fields=("password",))
    assert msgspec.json.decode(value["arguments"]) == {
        "password": "[redacted:field]",
        "to": "[redacted:email]",
        "escaped": "[redacted:email]",
    }


def test_base64_data_becomes_its_size_and_digest() -> None:
    """Equal images have equal digests; the data is gone, with or without ``data:``."""
    data = "iVBORw0KGgo" * 40
    for text in (data, f"data:image/png;base64,{data}"):
        value, places = redact({"url": text})
        assert data[:30] not in value["url"]
        assert value["url"].startswith(f"[redacted:base64 {len(text)} characters sha256 ")
        assert redact({"url": text}, builtin=())[0] == value
        assert places == ["request.url"]


def test_what_is_too_long_or_too_deep_is_replaced() -> None:
    """No search may delay a response: what is not searched is not written."""
    value, _ = redact({"text": "a. " * MAX_STRING})
    assert value == {"text": f"[redacted:{3 * MAX_STRING} characters]"}
    deep: Any = SECRETS["email"]
    for _ in range(200):
        deep = [deep]
    assert SECRETS["email"] not in str(redact(deep)[0])
    nested = SECRETS["email"]
    for _ in range(6):
        nested = msgspec.json.encode([nested]).decode()
    assert SECRETS["email"] not in str(redact({"a": nested})[0])


def test_patterns_of_the_configuration_apply_with_the_builtin_ones() -> None:
    """They have the name of the configuration, and are found in names of fields, too."""
    value, places = redact({"C-123": "C-456 a@b.example"}, patterns={"case": r"C-\d+"})
    assert value == {"[redacted:case]": "[redacted:case] [redacted:email]"}
    assert places[0].startswith("request")


def test_numbers_of_cards_are_found_without_quotes() -> None:
    """A number is no string, but one with a card's checksum is a card."""
    assert redact({"a": 4111111111111111, "b": 4111111111111112, "c": [1.5, 2]}) == (
        {"a": "[redacted:credit_card]", "b": 4111111111111112, "c": [1.5, 2]},
        ["request.a"],
    )


def test_names_of_text_hide_the_answer() -> None:
    """``content`` is what a protocol calls the text that a recorded answer has."""
    answer = {"choices": [{"text": "t", "reasoning": "r", "tool_calls": [{"arguments": "{}"}]}]}
    redactor = Redactor(RedactionConfig(fields=("choices.*.message.content",)))
    assert redactor.redact_answer(answer, []) == {
        "choices": [
            {"text": "[redacted:field]", "reasoning": "r", "tool_calls": [{"arguments": "{}"}]}
        ]
    }


def test_list_of_places_is_bounded() -> None:
    """A request with a thousand secrets names the first places."""
    _, places = redact([SECRETS["email"]] * 1000)
    assert len(places) == 32


TEXTS: Final = st.text(max_size=20)
PLANTED: Final = st.builds(
    lambda before, secret, after: f"{before} {secret} {after}",
    TEXTS,
    st.sampled_from(sorted(SECRETS.values())),
    TEXTS,
)
VALUES: Final = st.recursive(
    TEXTS | PLANTED | PLANTED.map(lambda text: msgspec.json.encode({"a": text}).decode())
    | st.integers(-9, 9) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS | PLANTED, inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(VALUES)
def test_no_planted_secret_survives(value: Any) -> None:
    """Neither in a string nor in a name, at any depth, nor in the places."""
    redacted, places = redact(value)
    text = msgspec.json.encode([redacted, places]).decode()
    for secret in SECRETS.values():
        assert secret not in text
        assert msgspec.json.encode(secret).decode()[1:-1] not in text


@given(VALUES)
def test_redaction_is_idempotent(value: Any) -> None:
    """What was redacted has nothing left to redact."""
    redacted, _ = redact(value)
    assert redact(redacted)[0] == redacted


LETTERS: Final = "Abc123Def456Ghi789Jkl012Mno345Pqr678"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *[("api_key", f"gh{kind}_{LETTERS}") for kind in "pousr"],
        ("api_key", f"pypi-AgEI{LETTERS}"),
        ("api_key", f"SG.{LETTERS[:22]}.{LETTERS}"),
        ("api_key", f"123456789:AA{LETTERS[:33]}"),
        ("password", f"aws_secret_access_key={LETTERS}"),
        ("password", f"AccountKey={LETTERS}=="),
        ("password", "password=hunter2"),
        ("email", "anna%40example.org"),
        ("email", "anna\uff20example.org"),
        ("credit_card", "4111.1111.1111.1111"),
        ("credit_card", "4111\u00a01111\u00a01111\u00a01111"),
        ("credit_card", "4111\n1111\n1111\n1111"),
        (
            "private_key",
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\nlQdG\n-----END PGP PRIVATE KEY BLOCK-----",
        ),
    ],
)
def test_other_forms_of_secrets_are_replaced(name: str, secret: str) -> None:
    """Whatever the form, the bytes of the JSON show that there is something to find."""
    text = f"before {secret}, after"
    assert redact({"a": text})[0] == {"a": f"before [redacted:{name}], after"}
    for data in (msgspec.json.encode({"a": text}), msgspec.json.encode([text])):
        assert not Redactor(RedactionConfig()).is_clean(data)


def test_credentials_in_headers_and_urls_are_replaced() -> None:
    value, _ = redact(["Authorization: Token abcdef0123456789", "see ftp://anna:hunter2@host/x"])

    assert value == ["Authorization: [redacted:bearer]", "see ftp://[redacted:password]@host/x"]


@pytest.mark.parametrize(
    "text",
    [
        "pi is 3.141592653589793, and e is 2.718281828459045",
        "the password must have 8 characters; token = word, a_key == b; secrets are kept",
        "max_tokens: 5, host 10.12.14.16, version 1.22.333.4444",
        "http://example.org:8080/a and foo=bar",
    ],
)
def test_usual_text_with_similar_forms_is_kept(text: str) -> None:
    assert redact({"text": text}) == ({"text": text}, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('```json\n{"ssn": "123"}\n```', '```json\n{"ssn": "[redacted:field]"}\n```'),
        ('here: {"ssn": 123, "a": 1}', 'here: {"ssn": "[redacted:field]", "a": 1}'),
        ('{"ssn": "1"}\n{"SSN": "2"}', '{"ssn": "[redacted:field]"}\n{"SSN": "[redacted:field]"}'),
        ('\ufeff{"ssn": "1\\"2"}', '\ufeff{"ssn": "[redacted:field]"}'),
        ("{'ssn': '1', 'a': 2}", "{'ssn': '[redacted:field]', 'a': 2}"),
    ],
)
def test_fields_of_json_within_texts_are_hidden(text: str, expected: str) -> None:
    assert redact({"text": text}, fields=("ssn",))[0] == {"text": expected}


def test_data_urls_within_texts_become_their_size_and_digest() -> None:
    data = "data:image/png;base64," + "iVBORw0KGgo" * 20
    value, places = redact({"text": f"look: ![x]({data}) there"})

    assert "iVBORw0KGgo" not in value["text"]
    assert value["text"].startswith(f"look: ![x]([redacted:base64 {len(data)} characters sha256 ")
    assert value["text"].endswith("]) there")
    assert places == ["request.text"]
