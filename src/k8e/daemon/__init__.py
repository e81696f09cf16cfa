"""The daemon: the one process that owns a machine's sandboxes. It puts engine, store, core and doors together.

`k8e server` runs it in the foreground; `python -m k8e.daemon --ready-fd N` is how the command line starts it on demand.
It can be killed at any moment: sandboxes live on, and the next daemon goes on with them.
"""
