"""Identities: the daemon's certificate authority, API keys, and the certificates for which they are exchanged.

No I/O but three small files. Core decides what an identity may do.
"""
