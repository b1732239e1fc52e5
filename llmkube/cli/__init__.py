"""The `llmkube` command. Read `main` first: how subcommands are found, and how failures are told.

What commands do is in importable functions (`metal_credentials`, `fleet_registration`, …) that
tests and the demo call; the command modules (`metal`, `fleet`, `edge`, …) only parse and print.
"""
