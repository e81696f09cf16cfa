"""Who is who, by cryptography: our own certificate authority, API keys, and the certificates they are exchanged for.

The lowest room, with no I/O but two small files. What somebody may do with an identity is decided in core.
"""
