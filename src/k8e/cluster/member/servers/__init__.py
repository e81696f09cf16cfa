"""Several servers of one cluster: how one becomes a server, and how nodes find those that live."""
