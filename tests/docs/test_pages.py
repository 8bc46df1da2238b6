"""What runs the pages must itself find what is wrong with one."""

import time
from pathlib import Path

import pytest

from tests.docs.pages import blocks, check, differs, free_ports, run

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


def page(*fences: tuple[str, str]) -> str:
    return "\n\n".join(f"Some words.\n\n```{kind}\n{text}\n```" for kind, text in fences)


def test_a_page_is_run_in_one_shell_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    check(
        page(
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
    ("fences", "said"),
    [
        ([("sh", "echo one"), ("text", "two")], "line 3: shown:\ntwo\n\nprinted:\none\n"),
        ([("sh", "true"), ("sh", "echo why >&2; false; echo on")], "line 9 failed:\necho why"),
        ([("sh", "false | true")], "line 3 failed"),
        ([("sh", "echo $nothing")], "nothing: unbound variable"),
        ([("text", "one")], "before anything is run"),
        ([("yaml", "one: 1")], "nothing to run"),
        ([("sh", "echo"), ("text", ""), ("text", "")], "3: it is shown twice"),
    ],
)
def test_what_does_not_do_as_it_says_is_found(
    tmp_path: Path, fences: list[tuple[str, str]], said: str
) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    with pytest.raises(AssertionError, match=said):
        check(page(*fences), folder)


def test_what_still_runs_is_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    [printed] = run(page(("sh", "sleep 600 & echo $!")), folder).outputs
    assert runs(int(printed)) is False


def runs(process: int) -> bool:
    """Whether it still does after a while."""
    stat = Path(f"/proc/{process}/stat")
    for _ in range(200):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return False
        time.sleep(0.05)
    return True


def test_each_port_that_is_shown_is_a_free_one() -> None:
    ports = free_ports("${PORT:-8000} ${ADMIN_PORT:-8081} 127.0.0.1:8001 127.0.0.1:9 ${HOME:-80}")
    assert set(ports) - {"PORT", "ADMIN_PORT", "MINDIE_PORT"} == {"8000", "8081", "8001", "1025"}
    assert ports["PORT"] == ports["8000"] != ports["ADMIN_PORT"] == ports["8081"]
    assert len(set(ports.values())) == 4
    assert not set(ports.values()) & set(ports)


def test_what_serves_is_left_running_on_a_free_port_beside_its_stand_in(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    check(
        page(
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


def test_what_does_not_serve_fails_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    with pytest.raises(AssertionError, match=r"line 3 failed(?s:.*)no such file: none\.yaml"):
        check(page(("sh", "interlingua serve none.yaml")), folder)


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
def test_dots_stand_for_anything(shown: str, printed: str, *, same: bool) -> None:
    assert (differs(shown, printed) == "") == same


def test_a_block_knows_its_line() -> None:
    assert [block.line for block in blocks(page(("sh", "a\nb"), ("sh", "c")))] == [3, 10]
