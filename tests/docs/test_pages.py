"""The page runner reports each kind of error on a page."""

import time
from pathlib import Path

import pytest

from tests.docs.pages import allocate_ports, check_page, describe_difference, parse_blocks, run_page

GATEWAY = """\
listeners: [{address: "127.0.0.1:8000", protocols: [openai]}]
backends: {w: {protocol: openai, workers: ["http://127.0.0.1:8001"]}}
models: {chat: {backend: w, model: far}}"""
STAND_IN = """\
listeners: [{address: "127.0.0.1:8001", protocols: [openai]}]
backends: {f: {kind: echo, script: [far]}, n: {kind: echo, script: [near]}}
models: {far: {backend: f}, near: {backend: n}}"""
ASK = """\
import httpx
said = httpx.post("http://127.0.0.1:8000/v1/completions", json={"model": "chat", "prompt": "?"})
print(said.json()["choices"][0]["text"])"""


def build_page(*fences: tuple[str, str]) -> str:
    return "\n\n".join(f"Some words.\n\n```{kind}\n{text}\n```" for kind, text in fences)


def test_page_is_run_in_one_shell_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()

    check_page(
        build_page(
            ("sh", "echo one > file; word=two"),
            ("yaml", "this: is not run"),
            ("sh", 'cat file; echo "$word"'),
            ("text", "one\ntwo"),
            ("sh", "ls"),
            ("text", "file"),
        ),
        folder,
    )


@pytest.mark.parametrize(
    ("fences", "message"),
    [
        ([("sh", "echo one"), ("text", "two")], "line 3: shown:\ntwo\n\nprinted:\none\n"),
        ([("sh", "true"), ("sh", "echo why >&2; false; echo on")], "line 9 failed:\necho why"),
        ([("sh", "false | true")], "line 3 failed"),
        ([("sh", "echo $nothing")], "nothing: unbound variable"),
        ([("text", "one")], "an output block has no commands before it"),
        ([("yaml", "one: 1")], "has no block to run"),
        ([("sh", "echo"), ("text", ""), ("text", "")], "3: it is shown twice"),
    ],
)
def test_page_with_wrong_output_or_failing_command_is_an_error(
    tmp_path: Path, fences: list[tuple[str, str]], message: str
) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    with pytest.raises(AssertionError, match=message):
        check_page(build_page(*fences), folder)


def test_background_processes_of_a_page_are_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()

    [printed] = run_page(build_page(("sh", "sleep 600 & echo $!")), folder).outputs

    assert is_running(int(printed)) is False


def is_running(process: int) -> bool:
    """Return whether the process still runs after a while."""
    stat = Path(f"/proc/{process}/stat")
    for _ in range(200):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return False
        time.sleep(0.05)
    return True


def test_each_documented_port_is_replaced_by_a_free_port() -> None:
    ports = allocate_ports(
        "${PORT:-8000} ${ADMIN_PORT:-8081} 127.0.0.1:8001 127.0.0.1:9 ${HOME:-80}"
    )
    assert set(ports) - {"PORT", "ADMIN_PORT"} == {"8000", "8081", "8001"}
    assert ports["PORT"] == ports["8000"] != ports["ADMIN_PORT"] == ports["8081"]
    assert len(set(ports.values())) == 3
    assert not set(ports.values()) & set(ports)


def test_serve_commands_run_in_the_background_with_a_stand_in_worker(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()

    check_page(
        build_page(
            ('yaml title="gateway.yaml"', GATEWAY),
            ("sh", "interlingua serve gateway.yaml   # in a shell of its own"),
            ("sh", "grep -o '127[^\"]*' gateway.yaml"),
            ("text", "127.0.0.1:8000\n127.0.0.1:8001"),
            ("sh", "sed -i s/far/near/ gateway.yaml\ninterlingua serve gateway.yaml"),
            ("python", ASK),
            ("text", "near"),
        ),
        folder,
        STAND_IN,
    )


def test_failing_serve_command_fails_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    with pytest.raises(AssertionError, match=r"line 3 failed(?s:.*)no such file: none\.yaml"):
        check_page(build_page(("sh", "interlingua serve none.yaml")), folder)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a  b\n", "a b", True),
        ("a …\nb", "a 17 %\nb", True),
        ("a\n…\nz", "a\n1\n2\nz", True),
        ("a\n…\nz", "a\nz", True),
        ("a.b", "axb", False),
        ("a", "a\nb", False),
        ("a …", "b 1", False),
    ],
)
def test_ellipsis_matches_any_text(shown: str, printed: str, *, same: bool) -> None:
    assert (describe_difference(shown, printed) == "") == same


def test_block_has_its_line_number() -> None:
    assert [block.line for block in parse_blocks(build_page(("sh", "a\nb"), ("sh", "c")))] == [
        3,
        10,
    ]
