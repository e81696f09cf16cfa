"""A member of a cluster on this machine: a server with its control plane, or a worker. Both are nodes.

It uses the machine as it is. Namespaces, where a test has several machines in one, are the test's.
"""
