"""A real node: kubelet, containerd and a network of Macs, on one machine, gone afterwards.

`make e2e` builds the images, starts a control plane and a node, installs the shipped manifests
with `kubectl apply -k`, and proves what only real pods can prove. Start with `node.py`; the proofs
are the test modules beside it.
"""
