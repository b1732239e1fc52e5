"""What the documentation tells people to type exists, and so does what it points at."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from devcluster import kubectl
from hack import reference
from llmkube.cli.main import SUBCOMMANDS, app, load
from tests.support.markdown import (
    PAGES,
    ROOT,
    anchors,
    blocks,
    commands,
    links,
    page,
    relative,
    section,
    spans,
    without_blocks,
)

TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OPERATIONS = "docs/operations.md"
HELP = {"--help", "-h"}


def ids(paths: list[Path]) -> list[str]:
    return [relative(path) for path in paths]


# make -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_targets_of_make_exist(path: Path) -> None:
    for line in commands(path.read_text(encoding="utf-8")):
        match = re.match(r"(?:[A-Z_]+=\S+ )*make(?: |$)(.*)", line)
        for word in shlex.split(match[1], comments=True) if match else ():
            name, equals, _ = word.partition("=")
            if equals:
                assert settable(name), f"{line}: nothing reads {name}"
            elif not word.startswith("-"):
                assert word in TARGETS, line


def settable(name: str) -> bool:
    """A variable that the Makefile or a script that it starts reads."""
    readers = [ROOT / "Makefile", ROOT / "hack" / "build-image.sh"]
    return any(re.search(rf"\b{name}\b", reader.read_text()) for reader in readers)


# llmkube ----------------------------------------------------------------------------------------
def llmkube_words(line: str) -> list[str] | None:
    """The words after `llmkube`; None if the line is no such command."""
    match = re.match(r"(?:[^\s=]*/)?llmkube (?=[a-z-])(.*)", line)
    if match is None:
        match = re.match(r"((?:metal|fleet) (?:[a-z]|--).*)", line)
    if match is None:
        return None
    text = match[1].replace("|", " ").replace("[", " ").replace("]", " ").replace("…", " ")
    return shlex.split(text, comments=True)


def resolve(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and the rest of them."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while getattr(command, "commands", None) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        children = SUBCOMMANDS if command.name in (None, "llmkube") else command.commands
        assert name in children, f"no command {name!r} in {' '.join(words)!r}"
        command = load(name) if children is SUBCOMMANDS else command.commands[name]
    return command, rest


def flags_of(command: Any) -> set[str]:
    return {s for p in command.params for s in (*p.opts, *p.secondary_opts) if s.startswith("-")}


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_commands_and_flags_of_llmkube_exist(path: Path) -> None:
    for line in commands(path.read_text(encoding="utf-8")):
        words = llmkube_words(line)
        if words is None:
            continue
        command, rest = resolve(words)
        for word in rest:
            if word.startswith("-") and word != "-":
                assert word.partition("=")[0] in flags_of(command) | HELP, line


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_flags_that_are_named_alone_exist(path: Path) -> None:
    known = set(HELP) | flags_of(typer.main.get_command(app))
    for _, command in reference.leaf_commands():
        known |= flags_of(command)
    for span in spans(path.read_text(encoding="utf-8")):
        match = re.match(r"(--[a-z][a-z-]+)", span)
        assert match is None or match[1] in known, span


def test_every_command_is_in_the_readme() -> None:
    for path, _ in reference.leaf_commands():
        assert f"`{path}" in page("README.md"), path


# Files and links --------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_relative_links_resolve(path: Path) -> None:
    for link in links(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


_FOLDERS = "|".join(sorted(p.name for p in ROOT.iterdir() if p.is_dir() and p.name[0] != "."))
_PATH = re.compile(rf"(?<![\w./-])(?:\./)?((?:{_FOLDERS})/[\w./-]*\w)")


MY_CLUSTER, OVERLAY_EXAMPLE = "config/my-cluster", "config/overlay-example"
"""What the reader makes, by a copy of the second."""


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_files_that_are_named_exist(path: Path) -> None:
    for line in commands(path.read_text(encoding="utf-8")):
        for name in _PATH.findall(line.replace(MY_CLUSTER, OVERLAY_EXAMPLE)):
            assert (ROOT / name).exists(), f"{name} in {line!r}"


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_kustomizations_that_are_applied_exist(path: Path) -> None:
    for line in commands(path.read_text(encoding="utf-8")):
        for name in re.findall(r"\s-k (config/\S+)", line.replace(MY_CLUSTER, OVERLAY_EXAMPLE)):
            assert (ROOT / name / "kustomization.yaml").exists(), line


def test_the_example_overlay_sets_what_it_shows() -> None:
    """Documentation shows it, and people copy it; `image_fields.yaml` cannot be shared."""
    (example,) = blocks(section(page(OPERATIONS), "Configure"), "yaml")
    overlay = ROOT / OVERLAY_EXAMPLE
    assert example.strip() == (overlay / "kustomization.yaml").read_text().strip()
    fields = (ROOT / "config/default/image_fields.yaml").read_text()
    assert (overlay / "image_fields.yaml").read_text() == fields
    built = subprocess.run(
        [kubectl.path(), "kustomize", str(overlay)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    objects = {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(built.stdout)}
    deployment = objects["Deployment", "llmkube-controller"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example.com/")
    assert "--deny-cidr=10.96.0.0/12" in container["args"]
    verifier = objects["ConfigMap", "llmkube-verifier"]["data"]["image"]
    assert verifier.startswith("registry.example.com/")
    assert ("PrometheusRule", "llmkube") not in objects, "its CRD may be missing"


# A stranger's machine ---------------------------------------------------------------------------
def private_words() -> Iterator[str]:
    """Folders of whoever writes: this checkout, and homes."""
    yield f"{ROOT}/"
    yield from ("/root/", "/home/", "/Users/")


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_no_path_of_the_writers_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for word in private_words():
        assert not re.search(rf"(?<![\w./]){re.escape(word)}", text), word


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_tables_are_whole(path: Path) -> None:
    """A bar too many shifts every later column, and no renderer complains."""
    width = 0
    for line in without_blocks(path.read_text(encoding="utf-8")).splitlines():
        bars = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert bars in (0, width) or not width, line
        width = bars
