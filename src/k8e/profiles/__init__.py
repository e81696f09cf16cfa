"""The second front door's policy: from what somebody typed, and what lies in the directory, to one cage. Pure.

Nothing here reads a file, a variable or a clock: facts come in (`scene.Scene`), a decision comes out
(`effective.Cage`). The command line waits for it, so modules import next to nothing; `config` (TOML) is for those who
have a file.
"""
