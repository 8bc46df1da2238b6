"""A valid file with one token replaced, removed or doubled loads, or its errors have positions."""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Final

import pytest
import yaml

from docs.generate.configuration_examples import EXAMPLES
from gateway.config.errors import ConfigError
from gateway.config.loader import load_text, load_worker_list

ROOT: Final = Path(__file__).parents[4]
GOOD: Final = ROOT / "tests" / "golden" / "config" / "good"
FILES: Final = (
    *sorted(GOOD.glob("*.yaml")),
    *sorted((ROOT / "gateway" / "cli" / "defaults").glob("*.yaml")),
    *sorted((ROOT / "deploy").rglob("*.yaml")),
    *sorted((ROOT / "tests" / "clients").glob("*.yaml")),
    ROOT / "tests" / "oracle" / "gateway.yaml",
)
BLOCK: Final = re.compile(r"^```yaml[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLE: Final = re.compile(r"\$\{(\w+)\}")
COMMENT: Final = re.compile(r"(?:^|(?<=\s))#[^\n]*")
TOKEN: Final = re.compile(r"\w[\w./-]*|[^\w\s]|(?<=\n) +")
OTHER_TOKENS: Final = ("[]", "{}", "~", "''", "5", "-1", "true", "*", "1e999", "a", "{a: [b]}")
SMALLEST: Final[dict[str, dict[str, object]]] = {
    "backends": {"gpu": {"protocol": "openai", "workers": ["http://127.0.0.1:8001"]}},
    "models": {"chat": {"backend": "gpu"}},
}
"""The required fields that the example of a section lacks."""
WORKER_LIST: Final = """- "http://10.0.0.1:8000"
- {url: "http://10.0.0.2:8000", weight: 2, max_concurrency: 8, auth: {bearer: "abc"}}
- url: "https://10.0.0.3"
  headers: {x-a: b}
"""
KEY_FILE: Final = f"""\
{{"name": "a", "sha256": "{"0" * 64}", "limits": {{"requests": "60/min", "budget": "5M/day"}}}}
{{"name": "b", "sha256": "{"1" * 64}", "models": ["m"]}}
"""
SAMPLE: Final = 400
SHARES: Final = 8
LOCATION: Final = re.compile(r"[^\n]*?:[1-9]\d*:[1-9]\d*: \S")


@cache
def list_configurations() -> dict[str, str]:
    """Return every valid configuration of the product, its documents and its tests, by name."""
    texts = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in FILES}
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for page in pages:
        for number, text in enumerate(BLOCK.findall(page.read_text("utf-8"))):
            texts[f"{page.relative_to(ROOT)}-{number}"] = text
    for section, example in EXAMPLES.items():
        document = yaml.safe_load(example)
        document |= {key: one | document.get(key, {}) for key, one in SMALLEST.items()}
        texts[section.__name__] = yaml.safe_dump(document)
    return {name: text for name, text in texts.items() if find_error(text, build_env(text)) is None}


def build_env(text: str) -> dict[str, str]:
    values = {"PORT": "8000", "NUMBER": "4096", "WORD": "tea", "EMPTY": "", "SECRET": "s"}
    names = {*VARIABLE.findall(text), *re.findall(r"\w+_(?:PASSWORD|KEY|TOKEN)", text)}
    return dict.fromkeys(names, "0" * 64) | values


def find_error(text: str, env: dict[str, str]) -> ConfigError | None:
    """Return the error of a file, or None. Any other exception fails the test."""
    return catch_error(lambda: load_text(text, str(GOOD / "gateway.yaml"), env=env, insecure=True))


def catch_error(load: Callable[[], object]) -> ConfigError | None:
    try:
        load()
    except ConfigError as error:
        return error
    return None


def list_distinct_tokens(texts: Iterable[str]) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield each token but those of comments, and of lines that an earlier text has, too.

    A line is the same if it stands below the same keys: its tokens have the same meaning.
    """
    seen = set()
    for text in texts:
        start, parents = 0, [(-1, "")]
        for line in text.splitlines(keepends=True):
            content = COMMENT.sub("", line.rstrip("\n"))
            end, indent = start + len(content), len(content) - len(content.lstrip())
            if content.strip():
                parents = [parent for parent in parents if parent[0] < indent]
                place = (*(key for _, key in parents), content.strip())
                parents.append((indent, content.strip()))
                if place not in seen:
                    seen.add(place)
                    yield from ((text, token) for token in TOKEN.finditer(text, start, end))
            start += len(line)


def mutate_token(draw: random.Random, text: str, start: int, end: int) -> Iterator[str]:
    """Return the text with this token doubled, removed, and replaced by other kinds of tokens."""
    token, words = text[start:end], TOKEN.findall(text)
    n = draw.randrange(len(token))
    others = (
        *(token + token, f"{token} {token}", "", token[:n] + token[n + 1 :], token + "x"),
        *(draw.choice(words), draw.choice(words), draw.choice(OTHER_TOKENS)),
    )
    changed = dict.fromkeys(other for other in others if other != token)
    yield from (text[:start] + other + text[end:] for other in changed)


def check_mutations(texts: Iterable[str], find: Callable[[str], ConfigError | None]) -> int:
    """Return the number of rejected texts; each error must be a sentence with a position."""
    refused = 0
    for text in texts:
        try:
            error = find(text)
        except Exception as unexpected:
            unexpected.add_note(text)
            raise
        if error is not None:
            refused += 1
            assert error.issues
            assert all(map(LOCATION.match, str(error).splitlines())), str(error)
            assert all(one.message.strip() for one in error.issues)
    return refused


def test_configurations_of_product_documents_and_tests_are_collected() -> None:
    names = list_configurations()

    assert len(names) > 70
    for start in ("tests/golden", "gateway/cli", "docs/", "deploy/", "ListenerConfig"):
        assert any(name.startswith(start) for name in names), start


@pytest.mark.parametrize("seed", range(4))
def test_one_changed_token_gives_sentences_with_places(seed: int) -> None:
    draw, texts = random.Random(seed), list(list_configurations().values())
    refused = 0

    for _ in range(SAMPLE // SHARES):
        text = draw.choice(texts)
        token = draw.choice(list(TOKEN.finditer(text)))
        mutations = mutate_token(draw, text, *token.span())
        refused += check_mutations(mutations, partial(find_error, env=build_env(text)))

    assert SAMPLE // 4 < refused < SAMPLE


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_changed_token_gives_sentences_with_places(share: int) -> None:
    draw, refused = random.Random(share), 0
    tokens = list(list_distinct_tokens(list_configurations().values()))

    for text, token in tokens[share::SHARES]:
        mutations = mutate_token(draw, text, *token.span())
        refused += check_mutations(mutations, partial(find_error, env=build_env(text)))

    assert len(tokens) > 8000
    assert refused > 1000


def find_worker_list_error(folder: Path, text: str) -> ConfigError | None:
    return catch_error(
        lambda: load_worker_list(text.encode(), str(folder / "workers.yaml"), env={})
    )


def find_key_file_error(folder: Path, text: str) -> ConfigError | None:
    (folder / "keys.jsonl").write_text(text, "utf-8")
    config = """
listeners: [{address: "127.0.0.1:8000", protocols: [openai]}]
backends: {e: {kind: echo, script: [a]}}
models: {m: {backend: e}}
keys_file: keys.jsonl
"""
    return catch_error(
        lambda: load_text(config, str(folder / "gateway.yaml"), env={}, insecure=True)
    )


@pytest.mark.parametrize(
    ("text", "find"),
    [(WORKER_LIST, find_worker_list_error), (KEY_FILE, find_key_file_error)],
    ids=["workers", "keys"],
)
def test_one_changed_token_of_a_file_that_the_configuration_names_gives_sentences_with_places(
    tmp_path: Path, text: str, find: Callable[[Path, str], ConfigError | None]
) -> None:
    draw = random.Random(1)
    assert find(tmp_path, text) is None

    refused = sum(
        check_mutations(mutate_token(draw, text, *token.span()), partial(find, tmp_path))
        for token in TOKEN.finditer(text)
    )

    assert refused > 380


@pytest.mark.parametrize("others", ["[openai, tritn]", "[tritn, openai]", "[openai, tritn, ovmss]"])
def test_unknown_protocol_beside_others_is_named_with_its_position(others: str) -> None:
    text = (
        "version: 1\n"
        f"listeners: [{{address: '127.0.0.1:8000', protocols: {others}}}]\n"
        "backends: {o: {kind: ech}}\nmodels: {m: {backend: o}}\n"
    )

    error = find_error(text, {})

    assert error is not None

    messages = [error.format_issue(issue) for issue in error.issues]
    assert any(
        ":2:" in one and "'tritn' is not a protocol; did you mean" in one for one in messages
    )
    assert any(":3:" in one and "'ech'" in one for one in messages)
