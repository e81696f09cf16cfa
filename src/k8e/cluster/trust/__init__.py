"""Trust in a cluster: certificate authorities, the certificates of its programs, and the tokens by which machines join.

Decisions are pure functions over the time that they are given; files are written whole or not at all.
"""
