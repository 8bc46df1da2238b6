"""Conversations on the wire, each in a file that a reviewer can read.

Lines with ``> `` are sent: a request line, further header lines, then, after an empty ``> ``, the
body. Lines with ``< `` are received: the status and the content type, then the body, in which ``…``
matches anything on one line (an id, a time). The gateway's configuration is the YAML file in the
folder.
"""

import re
from pathlib import Path

import pytest

from tests.conftest import Serve

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*/*.wire"))


def parse_transcript(text: str) -> list[tuple[list[str], list[str]]]:
    """Return the exchanges of a transcript: lines sent, lines expected."""
    exchanges: list[tuple[list[str], list[str]]] = []
    last = ""
    for line in text.splitlines():
        if line.startswith(">"):
            if last != ">":
                exchanges.append(([], []))
            exchanges[-1][0].append(line[2:])
        elif line.startswith("<"):
            exchanges[-1][1].append(line[2:])
        last = line[:1]
    return exchanges


def compile_body_pattern(lines: list[str]) -> re.Pattern[str]:
    """Compile a pattern for a body in which ``…`` matches anything."""
    return re.compile("\n".join(".*?".join(map(re.escape, line.split("…"))) for line in lines))


@pytest.mark.parametrize("file", FILES, ids=[f"{f.parent.name}/{f.stem}" for f in FILES])
async def test_transcript_matches_the_gateway_responses(serve: Serve, file: Path) -> None:
    config = (file.parent / f"{file.parent.name}.yaml").read_text("utf-8")
    gateway = await serve(config)

    for sent, received in parse_transcript(file.read_text("utf-8")):
        method, path = sent[0].split()
        empty = sent.index("") if "" in sent else len(sent)
        headers = dict(line.split(": ", 1) for line in sent[1:empty])
        body = "\n".join(sent[empty + 1 :]).encode()

        response = await gateway.http.request(method, path, headers=headers, content=body)

        kind = response.headers.get("content-type", "")
        assert f"{response.status_code} {kind}".strip() == received[0]
        wanted = compile_body_pattern(received[1:])
        assert wanted.fullmatch(response.text.rstrip("\n")), (
            f"wanted\n{chr(10).join(received[1:])}\ngot\n{response.text}"
        )
