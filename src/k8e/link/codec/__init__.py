"""The agent protocol without I/O: bytes to frames and back, and the payloads of requests and answers."""
