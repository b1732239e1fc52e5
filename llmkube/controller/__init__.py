"""The controller: informers, queues and reconcilers, composed and run.

`options` is what can be set, `tuning` the durations, `parts` builds the pieces, `run` starts and
stops them. Nothing here decides anything about a Mac or a site: that is `llmkube.rules`.
"""
