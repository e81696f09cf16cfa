"""git between a project and its sandboxes: the copy that a sandbox begins with, and commits that come back."""
