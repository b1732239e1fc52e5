"""The edge: pushes one cluster's status to its FederatedCluster in the datacenter.

Read `parts` (what is reported, pure), `local` (where it is read), `pusher` (the loop), `edge` (the
composition root). The datacenter's half is `llmkube.reconcilers.federatedcluster`.
"""
