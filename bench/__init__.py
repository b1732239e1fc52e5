"""Measurements on the real API server: `make bench`, or one part with `make bench BENCH=hub`.

Each figure stands beside its peer's from the same run on the same machine: absolute numbers from
shared machines mean little, ratios do. docs/performance.md explains the method.
"""
