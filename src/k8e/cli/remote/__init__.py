"""The command line against a gateway on another machine. Imported only when one is meant: gRPC alone takes longer
than a local command does.

`RemoteClient` answers the requests that the local door answers, so the commands do not know the difference.
"""
