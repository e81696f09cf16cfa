"""The root of a sandbox: the machine's toolchain, or an image."""
