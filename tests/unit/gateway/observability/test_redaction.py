"""Redaction replaces secrets and keeps other text; no planted secret survives anywhere."""

import re
from collections.abc import Iterator
from re import _constants, _parser
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.schema import RedactionConfig
from gateway.observability import redaction
from gateway.observability.redaction import _KEY_PREFIXES, _PATTERNS, MAX_STRING, Redactor

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
    """The text around it stays, its position is reported, and a disabled pattern finds nothing."""
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
def test_ordinary_text_is_kept(text: str) -> None:
    """Text that only resembles a secret is not replaced."""
    assert redact({"text": text}) == ({"text": text}, [])


def test_fields_are_hidden_by_name_and_by_path() -> None:
    """A name matches at any depth and in any case; a path only from the top."""
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
    """Tool call arguments are JSON text, whose fields are redacted, too."""
    arguments = '{"password": "hunter2", "to": "anna@example.org", "escaped": "\\u0061@b.example"}'
    value, _ = redact({"arguments": arguments}, fields=("password",))

    assert msgspec.json.decode(value["arguments"]) == {
        "password": "[redacted:field]",
        "to": "[redacted:email]",
        "escaped": "[redacted:email]",
    }


def test_base64_data_becomes_its_size_and_digest() -> None:
    """Equal images have equal digests, with or without ``data:``."""
    data = "iVBORw0KGgo" * 40
    for text in (data, f"data:image/png;base64,{data}"):
        value, places = redact({"url": text})
        assert data[:30] not in value["url"]
        assert value["url"].startswith(f"[redacted:base64 {len(text)} characters sha256 ")
        assert redact({"url": text}, builtin=())[0] == value
        assert places == ["request.url"]


def test_what_is_too_long_or_too_deep_is_replaced() -> None:
    """A search must not delay a response: values that are not searched are replaced."""
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
    """They report their configured name, and also match names of fields."""
    value, places = redact({"C-123": "C-456 a@b.example"}, patterns={"case": r"C-\d+"})
    assert value == {"[redacted:case]": "[redacted:case] [redacted:email]"}
    assert places[0].startswith("request")


def test_numbers_of_cards_are_found_without_quotes() -> None:
    """A JSON number with a card's checksum is redacted."""
    assert redact({"a": 4111111111111111, "b": 4111111111111112, "c": [1.5, 2]}) == (
        {"a": "[redacted:credit_card]", "b": 4111111111111112, "c": [1.5, 2]},
        ["request.a"],
    )


def test_names_of_text_hide_the_answer() -> None:
    """``content`` is a protocol's field for the text of a recorded response."""
    response = {"choices": [{"text": "t", "reasoning": "r", "tool_calls": [{"arguments": "{}"}]}]}
    redactor = Redactor(RedactionConfig(fields=("choices.*.message.content",)))

    assert redactor.redact_answer(response, []) == {
        "choices": [
            {"text": "[redacted:field]", "reasoning": "r", "tool_calls": [{"arguments": "{}"}]}
        ]
    }


def test_list_of_places_is_bounded() -> None:
    """A request with a thousand secrets reports the first positions."""
    _, places = redact([SECRETS["email"]] * 1000)
    assert len(places) == 32


TEXTS: Final = st.text(max_size=8)
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
    max_leaves=8,
)  # fmt: skip


@given(VALUES)
def test_no_planted_secret_survives(value: Any) -> None:
    """A secret survives in no string, name or reported position at any depth."""
    redacted, places = redact(value)
    text = msgspec.json.encode([redacted, places]).decode()
    for secret in SECRETS.values():
        assert secret not in text
        assert msgspec.json.encode(secret).decode()[1:-1] not in text


@given(VALUES)
def test_redaction_is_idempotent(value: Any) -> None:
    """Redacting a redacted value changes nothing."""
    redacted, _ = redact(value)
    assert redact(redacted)[0] == redacted


LETTERS: Final = "Abc123Def456Ghi789Jkl012Mno345Pqr678"
BLANKS: Final = [chr(code) for code in range(1 << 16) if chr(code).isspace()]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *[("api_key", f"gh{kind}_{LETTERS}") for kind in "pousr"],
        ("api_key", f"pypi-AgEI{LETTERS}"),
        ("api_key", f"SG.{LETTERS[:22]}.{LETTERS}"),
        ("api_key", f"123456789:AA{LETTERS[:33]}"),
        ("api_key", f"bot123456789:AA{LETTERS[:33]}"),
        ("password", f"SharedAccessKey={LETTERS}="),
        ("password", "api-key: 0123456789abcdef0123456789abcdef"),
        ("password", "api-key:0123456789abcdef0123456789abcdef"),
        ("password", f"aws_secret_access_key={LETTERS}"),
        ("password", f"AccountKey={LETTERS}=="),
        ("password", "password=hunter2"),
        ("password", f"password: {LETTERS}"),
        ("password", f"aws_secret_access_key = {LETTERS}"),
        ("password", f"sig={LETTERS}%3D"),
        ("api_key", f"https://hooks.slack.com/services/T00000000/B00000000/{LETTERS[:24]}"),
        ("api_key", f"sq0csp-{LETTERS}{LETTERS[:7]}"),
        ("api_key", "0123456789abcdef0123456789abcdef-us12"),
        ("api_key", f"github_pat_{LETTERS}"),
        *[("api_key", f"{kind}{'0a' * 16}") for kind in ("AC", "SK")],
        ("api_key", f"MTk4{LETTERS[:20]}.Cl2FMQ.{LETTERS[:27]}"),
        ("api_key", f"https://discord.com/api/webhooks/123456789/{LETTERS}"),
        ("api_key", f"abc8Q~{LETTERS[:32]}"),
        *[("api_key", f"{kind}{LETTERS}{LETTERS}") for kind in sorted(_KEY_PREFIXES)],
        *[("api_key", f"{kind}{LETTERS}{LETTERS}") for kind in ("ABSK", "ATATT3", "EAAA", "ya29.")],
        *[("api_key", f"{kind}{LETTERS}") for kind in ("hvs.", "hvb.", "LTAI")],
        ("api_key", f"dp.pt.{LETTERS}{LETTERS[:7]}"),
        ("api_key", f"AKIA{LETTERS[:16].upper()}"),
        ("api_key", f"AIza{LETTERS}"),
        ("bearer", "Basic YW5uYTpodW50ZXIy"),
        ("email", "anna%40example.org"),
        ("email", "anna\uff20example.org"),
        ("credit_card", "4111.1111.1111.1111"),
        ("credit_card", "4111\u00a01111\u00a01111\u00a01111"),
        *[("credit_card", blank.join(["4111", "1111", "1111", "1111"])) for blank in BLANKS],
        (
            "private_key",
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\nlQdG\n-----END PGP PRIVATE KEY BLOCK-----",
        ),
        ("private_key", "-----BEGIN PGP MESSAGE-----\nhQEM\n-----END PGP MESSAGE-----"),
    ],
)
def test_other_forms_of_secrets_are_replaced(name: str, secret: str) -> None:
    """The bytes of the JSON show every form of a secret."""
    text = f"before {secret}, after"
    assert redact({"a": text})[0] == {"a": f"before [redacted:{name}], after"}
    for data in (msgspec.json.encode({"a": text}), msgspec.json.encode([text])):
        for written in (data, data.replace(b"/", rb"\/")):  # as PHP writes it
            assert not Redactor(RedactionConfig()).is_clean(written)


def test_credentials_in_headers_and_urls_are_replaced() -> None:
    value, _ = redact(
        [
            "authorization:Token abcdef0123456789",
            "Authorization: Token abcdef0123456789",
            "see ftp://anna:hunter2@host/x",
            "see redis://:hunter2@host/x",
        ]
    )

    assert [one.replace(" ", "").lower() for one in value[:2]] == [
        "authorization:[redacted:bearer]"
    ] * 2
    assert value[2:] == [
        "see ftp://[redacted:password]@host/x",
        "see redis://[redacted:password]@host/x",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "pi is 3.141592653589793, and e is 2.718281828459045",
        "the password must have 8 characters; token = word, a_key == b; secrets are kept",
        "max_tokens: 5, host 10.12.14.16, version 1.22.333.4444",
        "http://example.org:8080/a and foo=bar",
        "MACHINE.LEARNING.IS-FUN, SKILLS AND ACTION, a.b-c.d_e, v1.2.3-beta.4",
        "file.config.production-settings-and-more.json of org.example.application",
    ],
)
def test_ordinary_text_with_similar_forms_is_kept(text: str) -> None:
    assert redact({"text": text}) == ({"text": text}, [])


@pytest.mark.parametrize(
    "text",
    [
        "my_api_keyboard and the api_key_board, hotkeys, keynote, monkey_business",
        "a task-oriented-dialogue-system with risk-management-strategies and disk-encryption-tools",
        "pip install sk-learn-contrib-extensions",
        "ask-me-anything-about-this desk-research-and-surveys",
        "npm_config_registry and npm_package_version_string",
        "hf_hub_download_with_timeout(repo)",
        "pk_user_account_identifier and sk_table_of_contents",
        "xoxo-lots-of-love-and-kisses",
        "Basic internationalization and basic understanding/knowledge of it",
        "basic authentication-and-authorization",
        "bearer authentication is used, the bearer of bad news",
        "Column('id', Integer, primary_key=True, sort_key=None)",
        "tokenizer.pad_token=tokenizer.eos_token; client = Client(api_key=api_key, token=token)",
        "client = OpenAI(api_key=os.environ['OPENAI_API_KEY'])",
        "password=settings.password",
        "password=self.config.db_password, secret_key=os.environ.get('A'), token=os.getenv('B')",
        "Authorization: Bearer $TOKEN and Authorization: Bearer ${API_KEY} and Bearer <token>",
        "headers = {'Authorization': f'Bearer {api_key}'}; token=null, a_key=process.env.TOKEN",
        "curl -d token=$TOKEN -d secret=${SECRET} http://example.org",
        "foreign_key=user.id, cache_key=build_key, partition_key: customer, password=None",
        "max_tokens=4096, num_token: 20000000",
        "commit 3b18e512dba79e4c8300dd08aeb37f8e728b8dad",
        "sha256 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "md5 d41d8cd98f00b204e9800998ecf8427e 4111111111111111aaaabbbbccccdddd",
        "uuid 41111111-1111-1111-1111-abcdefabcdef of 2026",
        "uuids 123e4567-e89b-12d3-a456-426614174000 4a111111-1111-4111-a111-111111111116",
        "time 1700000000006 ms, 1700000000000000009 ns, date 20261128213248001",
        "0.4111111111111111 and [-0.4111111111111111, 0.4111111111111111]",
        "x+12345678 and (a)+10000000 and 12:00:00+0000 1234",
        "data SGVsbG8sIFdvcmxkISBUaGlzIGlzIG9yZGluYXJ5IHRleHQu end",
        "font AAEAAAASAQAABAAgR0RFRgSkBMQAAAEsAAAAKEdQT1O1fJk9AAABVAAAAJhHU1VC7jP7YwAAAewAAACI",
        "png iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhg==",
        "MSG.some_long_identifier_x.other_long_identifier",
        "class FooAKIAABCDEFGHIJKLMNOP: pass",
        "https://example.org/docs/api_keys#rotate-api-keys?lang=en",
        "HTTP 200 in 0.5 s; 99.9 %; ISBN 978-3-16-148410-0",
        "def get_token(token: str, secret_key: bytes) -> None: ...",
        "import sys; print(sys.version_info[:3], 1e-5, 0x7fffffffffffffff, 1_000_000_000_000)",
        "\u202e\x00 \ufeff NUL and bidi",
        "git@v1.2.3 @app.route('/x') a @ b x@y",
        "pi is 3.14159265358979323846264338327950288",
        "IPv6 2001:0db8:85a3:0000:0000:8a2e:0370:7334",
        "the secret: nobody knows; password: at least 8 characters; api_key: required",
        "SELECT token, secret FROM keys WHERE primary_key = 1234567",
        "Basic requirements: python3.11",
        "basic math2 and Basic english101 course2",
    ],
)
def test_prose_code_and_digests_are_kept(text: str) -> None:
    """Words that begin or end like a key, names in the place of a password, digits of a hash."""
    assert redact({"text": text}) == ({"text": text}, [])


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("OPENAI_KEY_sk-abcdefghijklmnopqrst", "sk-abcdefghijklmnopqrst"),
        ("see:sk-ant-api03-words-Ab1c-words", "sk-ant-api03-words-Ab1c-words"),
        ("cache_key=a=hunter2", "hunter2"),
        ("password=correcthorse", "correcthorse"),
        ("token=abcdefghijklmnopqrst", "abcdefghijklmnopqrst"),
        ("bearer abcdefghijklmnopqrst", "abcdefghijklmnopqrst"),
        ("Basic OTphYmNk", "OTphYmNk"),
        ("Bearer internal-admin-token", "internal-admin-token"),
        ("Authorization: Bearer internal-admin-token", "internal-admin-token"),
        ("Authorization: Token my-admin-token", "my-admin-token"),
        ("authorization:basic changeme", "changeme"),
        ("Authorization: Bearer $uperSecret1", "$uperSecret1"),
        ("Authorization: Bearer ${TOKEN:-hunter2}", "hunter2"),
        ('{"Authorization": "Bearer internal-admin-token"', "internal-admin-token"),
        ("headers={'Authorization': 'Bearer internal-admin-token'}", "internal-admin-token"),
        ("password=$uperSecret1", "$uperSecret1"),
        ("PGPASSWORD=$Winter2024! psql", "$Winter2024"),
        ("PGPASSWORD=$WINTER! psql", "$WINTER!"),
        ("password=${DB:-hunter2}", "hunter2"),
        ("password=config.Secret.Xy9", "config.Secret.Xy9"),
        ("password=null1", "null1"),
        ("secret_key=changeme", "changeme"),
        ("client_secret=abcdef-ghijkl", "abcdef-ghijkl"),
        ("api_key=correcthorsebattery", "correcthorsebattery"),
        ("auth_token=letmein-please", "letmein-please"),
        ("token=Hello-World-1234", "Hello-World-1234"),
        ("card 2.4111111111111111", "4111111111111111"),
        ("card 10.4111111111111111", "4111111111111111"),
        (
            "hash 41111111-1111-1111-1111-abcdefabcdef, card 4111 1111 1111 1111",
            "4111 1111 1111 1111",
        ),
    ],
)
def test_secret_of_words_or_beside_words_is_replaced(text: str, secret: str) -> None:
    assert secret not in redact({"text": text})[0]["text"]


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


EXPRESSIONS: Final = {
    **{name: one for name, one in vars(redaction).items() if isinstance(one, re.Pattern)},
    **{f"{index} {one.name}": one.regex for index, one in enumerate(_PATTERNS)},
    **{
        f"{index} before {one.name}": one.before
        for index, one in enumerate(_PATTERNS)
        if one.before
    },
}


def can_fail(node: tuple[Any, Any]) -> bool:
    """Whether a part of an expression may not match; the end of the text is one of its matches."""
    kind, value = node
    if kind is _constants.SUBPATTERN:
        return any(map(can_fail, value[-1]))
    if kind is _constants.BRANCH:
        at_end = [(_constants.AT, _constants.AT_END_STRING)]
        return not any(list(one) == at_end or not any(map(can_fail, one)) for one in value[1])
    return not (kind in _parser._REPEATCODES and value[0] == 0)


def find_rescans(nodes: Any, *, may_fail: bool = False) -> Iterator[str]:
    """The repetitions without a limit after which a search may fail, and begin anew within them."""
    nodes = list(nodes)
    for index, (kind, value) in enumerate(nodes):
        fails = may_fail or any(map(can_fail, nodes[index + 1 :]))
        if kind in _parser._REPEATCODES:
            is_unbounded = value[1] is _constants.MAXREPEAT
            if is_unbounded and fails:
                yield f"{value}"
            yield from find_rescans(value[2], may_fail=fails or value[1] > 1)
        elif kind is _constants.SUBPATTERN:
            yield from find_rescans(value[-1], may_fail=fails)
        elif kind is _constants.BRANCH:
            for branch in value[1]:
                yield from find_rescans(branch, may_fail=fails)
        elif kind in (_constants.ASSERT, _constants.ASSERT_NOT):
            yield from find_rescans(value[1], may_fail=True)
        elif kind is _constants.GROUPREF_EXISTS:
            for branch in value[1:]:
                yield from find_rescans(branch or (), may_fail=fails)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_read_each_character_a_bounded_number_of_times(name: str) -> None:
    """A search holds the interpreter lock: its time must grow with the text's length, not faster.

    So no repetition without a limit stands in a lookahead or before something that may fail.
    """
    parsed = _parser.parse(EXPRESSIONS[name].pattern, EXPRESSIONS[name].flags)
    assert list(find_rescans(parsed)) == []


@pytest.mark.parametrize(
    "expression",
    [
        r"x(?=[\w-]*[0-9])y",
        r"eyJ[\w-]{8,}\.",
        r"(?:a+b)?",
        r"(?:a+){2}",
        r"(?:a|b+)c",
        r"(a)?(?(1)b+|c)d",
    ],
)
def test_repetition_before_a_part_that_may_fail_is_seen(expression: str) -> None:
    """The check of the expressions finds each kind of them."""
    assert list(find_rescans(_parser.parse(expression)))


def test_text_after_many_beginnings_of_a_token_is_kept() -> None:
    """The first part of a JWT alone may be any Base64; the whole is a secret."""
    token = SECRETS["jwt"]
    text = f"{'-eyJaaaaaaaa' * 3} {'-dapi' * 50} {token}"
    assert redact([text])[0] == [text.replace(token, "[redacted:jwt]")]
