"""The verifier: dials a Mac back from inside the cluster and says what it found.

It runs as a pod of its own image, so it imports the standard library, cryptography and the clock,
and nothing else. `policy.py` and `protocol.py` are shared with the controller. Start with
`dialback.py`.
"""
