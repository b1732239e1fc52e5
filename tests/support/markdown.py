"""Read Markdown as far as the tests of the documentation need it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
"""Every page, whoever wrote it."""

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(`+)(.+?)\1")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str, language: str | None = None) -> list[str]:
    """Fenced code, of one language (None: of any)."""
    found = ((m[2], m[3]) for m in _FENCE.finditer(text))
    return [body for kind, body in found if language is None or kind == language]


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def spans(text: str) -> list[str]:
    """Inline code; `\\|` in a table is a bar."""
    return [m[2].replace("\\|", "|") for m in _SPAN.finditer(without_blocks(text))]


def commands(text: str) -> Iterator[str]:
    """Lines of code blocks without a prompt's output, and inline code."""
    for language in ("", "sh", "bash"):
        for body in blocks(text, language):
            yield from (line.split(" # ")[0].strip() for line in body.splitlines())
    yield from spans(text)


def links(text: str) -> list[str]:
    return _LINK.findall(without_blocks(text))


def anchors(text: str) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    return {_slug(heading) for heading in _HEADING.findall(without_blocks(text))}


def _slug(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.replace(" ", "-")


def section(text: str, heading: str) -> str:
    """What stands under a heading, until the next one of its level or above."""
    level, start = 0, 0
    for match in _headings(text):
        depth = len(match[0]) - len(match[0].lstrip("#"))
        if level and depth <= level:
            return text[start : match.start()]
        if not level and match[1] == heading:
            level, start = depth, match.end()
    assert level, f"no heading {heading!r}"
    return text[start:]


def _headings(text: str) -> Iterator[re.Match[str]]:
    """Headings, but no comments in code."""
    code = [(m.start(), m.end()) for m in _FENCE.finditer(text)]
    for match in _HEADING.finditer(text):
        if not any(begin <= match.start() < end for begin, end in code):
            yield match


def tables(text: str) -> list[list[dict[str, str]]]:
    """Every table, its rows by column name; inline code loses its marks."""
    found: list[list[dict[str, str]]] = []
    headers: list[str] | None = None
    for line in without_blocks(text).splitlines():
        if not line.startswith("|"):
            headers = None
        elif headers is None:
            headers = _cells(line)
            found.append([])
        elif not set(line) <= set("|-: "):
            found[-1].append(dict(zip(headers, _cells(line), strict=True)))
    return found


def table(text: str, column: str) -> list[dict[str, str]]:
    """The first table with that column."""
    return next(rows for rows in tables(text) if rows and column in rows[0])


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [cell.strip().strip("`") if cell.count("`") == 2 else cell.strip() for cell in cells]
