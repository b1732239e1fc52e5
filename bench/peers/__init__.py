"""Peers written for the bench: the same rules in other frameworks."""
