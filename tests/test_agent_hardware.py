"""Hardware from recorded output: real classes of Macs, and whatever else the programs may say."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.agent.hardware import parse_linux, parse_macos, read_capacity
from llmkube.agent.identity import (
    Identity,
    IngressCertificate,
    certificate_for,
    open_identity,
)
from llmkube.agent.reporter import make_report
from llmkube.agent.statedir import StateDir
from llmkube.api.report import ReportedCapacity, parse_report, render_report
from tests.support.macs import apple_gpu, displays, sysctl

GIB = 2**30


@pytest.mark.parametrize(
    ("chip", "cores", "gib", "raw", "metal"),
    [
        ("Apple M1", 8, 16, "spdisplays_mtlgpufamilyapple7", "Metal, Apple family 7"),
        ("Apple M1 Ultra", 64, 128, "spdisplays_metal3", "Metal 3"),
        ("Apple M2 Pro", 19, 32, "spdisplays_metal3", "Metal 3"),
        ("Apple M3 Max", 40, 128, "spdisplays_metal3", "Metal 3"),
        ("Apple M3 Ultra", 80, 512, "spdisplays_metal4", "Metal 4"),
        ("Apple M4", 10, 24, "spdisplays_metal4", "Metal 4"),
        ("Apple M5 Max", 40, 128, "spdisplays_metal4", "Metal 4"),
    ],
)
def test_apple_silicon(chip: str, cores: int, gib: int, raw: str, metal: str) -> None:
    found = parse_macos(sysctl(chip, gib * GIB), displays(apple_gpu(chip, cores, raw)))
    assert found == ReportedCapacity(chip, cores, gib * GIB, metal)


def test_an_intel_mac_with_two_gpus_has_no_core_count() -> None:
    intel = {"_name": "kHW_IntelUHDGraphics630Item", "spdisplays_metal": "spdisplays_supported"}
    amd = {"sppci_model": "AMD Radeon Pro 5500M", "spdisplays_vram": "8 GB"}
    chip = "Intel(R) Core(TM) i9-9980HK CPU @ 2.40GHz"
    found = parse_macos(sysctl(chip, 64 * GIB), displays(intel, amd))
    assert found == ReportedCapacity(chip, None, 64 * GIB, "Metal")


def test_the_gpu_with_cores_is_the_one_that_counts() -> None:
    first = {"_name": "eGPU", "spdisplays_metal": "spdisplays_supported"}
    gpu = apple_gpu("Apple M2", 10, "spdisplays_metal3")
    assert parse_macos("", displays(first, gpu)).gpu_cores == 10


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "null",
        "[]",
        "{",
        '{"SPDisplaysDataType": 3}',
        '{"SPDisplaysDataType": [3]}',
        '{"SPDisplaysDataType": null}',
        '{"SPDisplaysDataType": [{"sppci_cores": 40}]}',
        '{"SPDisplaysDataType": [{"sppci_cores": "99999999999"}]}',
        '{"SPDisplaysDataType": [{"spdisplays_mtlgpufamilysupport": ["x"]}]}',
        "[" * 100_000,
    ],
)
def test_damaged_output_costs_only_what_it_said(damage: str) -> None:
    expected = ReportedCapacity("Apple M4", None, 16 * GIB, None)
    assert parse_macos(sysctl("Apple M4", 16 * GIB), damage) == expected


@pytest.mark.parametrize("memory", ["", "0", "-1", "1e9", str(2**63), "9" * 40, "٣"])
def test_memory_is_a_positive_int64_or_nothing(memory: str) -> None:
    assert parse_macos(f"hw.memsize: {memory}\n", "").memory_bytes is None


def test_texts_are_capped_and_printable() -> None:
    chip = parse_macos(f"machdep.cpu.brand_string: Apple\x1b[31m\0 {'M' * 500}\n", "").chip
    assert chip is not None
    assert len(chip) == 128
    assert chip.isprintable()


def test_linux() -> None:
    cpuinfo = "processor\t: 0\nmodel name\t: AMD EPYC 9B14\nflags\t: fpu\n\nmodel name\t: other\n"
    meminfo = "MemTotal:       24684480 kB\nMemFree: 1 kB\n"
    assert parse_linux(cpuinfo, meminfo) == ReportedCapacity(
        "AMD EPYC 9B14", None, 24684480 * 1024, None
    )
    arm = parse_linux("processor\t: 0\nCPU part\t: 0xd0c\n", "", "Raspberry Pi 5 Model B\0")
    assert arm == ReportedCapacity("Raspberry Pi 5 Model B", None, None, None)


@given(st.text(), st.text() | st.recursive(st.none(), st.lists).map(json.dumps))
def test_nothing_crashes(sysctl_text: str, displays_text: str) -> None:
    parse_macos(sysctl_text, displays_text)
    parse_linux(sysctl_text, displays_text, sysctl_text)


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> tuple[Identity, IngressCertificate]:
    with StateDir.open(tmp_path_factory.mktemp("state") / "state") as state:
        found = open_identity(state)
        uid = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
        return found, certificate_for(state, found, uid, datetime(2026, 1, 1, tzinfo=UTC))


@given(chip=st.text(), metal=st.text(), cores=st.text(), memory=st.text())
def test_whatever_the_machine_says_the_report_is_valid(
    identity: tuple[Identity, IngressCertificate], chip: str, metal: str, cores: str, memory: str
) -> None:
    gpu = {"sppci_cores": cores, "spdisplays_mtlgpufamilysupport": metal}
    text = f"machdep.cpu.brand_string: {chip}\nhw.memsize: {memory}\n"
    capacity = parse_macos(text, displays(gpu))
    report = make_report(identity[1], identity[0], 9443, (), capacity)
    assert parse_report(render_report(report)).capacity == capacity


async def test_this_machine() -> None:
    capacity = await read_capacity()
    assert capacity.memory_bytes is None or capacity.memory_bytes > 2**28
