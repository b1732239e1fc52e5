"""Lists, watches, caches, queues and workers: the road of every event, from the API server to a
reconciler.

Start with `informer` (a cache that stays equal to the server) and `queue` and `worker` (who runs
when). docs/informers.md has the whole picture.
"""
