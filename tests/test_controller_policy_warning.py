"""A controller that does not know the cluster's own ranges says so at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.controller import running_controller

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        pytest.param([], True, id="no range"),
        pytest.param(["--deny-cidr=10.96.0.0/12"], False, id="a range"),
        pytest.param(["--controllers=federatedcluster"], False, id="no checks"),
    ],
)
async def test_it_warns_where_no_range_is_denied(
    crds: ControlPlane, flags: list[str], warned: bool
) -> None:
    async with running_controller(crds.admin_kubeconfig, *flags) as controller:
        warnings = [r["event"] for r in controller.records() if r["level"] == "warning"]
        assert any("--deny-cidr" in event for event in warnings) is warned
