"""The inside of a sandbox, as core uses it through the link; knows no sessions."""
