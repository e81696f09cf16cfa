"""The standalone program: one file for Linux, macOS and Windows with the commands that go through a gateway, in pure
Python. grpcio and cryptography are compiled for one system each: here are the parts of them that those commands use."""
