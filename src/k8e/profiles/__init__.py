"""The policy of agentkernel: decides, from options, files and the project's directory, what a sandbox may see and
reach.

Pure: no module reads a file, a variable or a clock. `context.Context` has the facts, `sandbox_policy.SandboxPolicy` the
decision. The command line imports these modules at every start, so they import next to nothing; `config` (TOML) is
imported only when there is a file.
"""
