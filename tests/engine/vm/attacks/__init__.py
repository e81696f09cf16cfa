"""Attacks on virtual machines. Those that are made on every runtime are the same tests here, from their own files;
emulated they take minutes each, so a soak has them. Those on the VMM and on its wire are made here only."""
