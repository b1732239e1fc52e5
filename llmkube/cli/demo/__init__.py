"""`llmkube demo`: the whole product on one machine, against a real API server.

`stage` puts everything up: control plane, manifests, the controller under its own account, agents
and edges as real processes. `acts` is the guided script of faults, each with the state that must
follow. `view` shows it. From a checkout; elsewhere `--kubeconfig` uses a cluster that exists.
"""

from llmkube.cli.demo.command import app

__all__ = ["app"]
