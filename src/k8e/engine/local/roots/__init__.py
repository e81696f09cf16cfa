"""What a sandbox sees at /: the machine's toolchain, or an image."""
