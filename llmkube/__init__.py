"""LLMKube: a control plane that tells the truth about Macs and edge clusters."""

__version__ = "0.1.0"
