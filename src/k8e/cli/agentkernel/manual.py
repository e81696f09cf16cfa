"""The texts of `agentkernel COMMAND --help`."""

from __future__ import annotations

SANDBOX = """\
Sandboxes that last: their files stay when they are stopped, and when the machine is.

  agentkernel sandbox create my-sandbox
  agentkernel sandbox start my-sandbox
  agentkernel exec my-sandbox npm test
  agentkernel sandbox stop my-sandbox
  agentkernel sandbox remove my-sandbox
"""

GIT = """\
A sandbox that has the project has a .git of its own, in which it commits. Its commits come back when you ask for them:
checked, and as refs below refs/k8e/NAME/. Nothing else of your repository changes.

  agentkernel git pull run-1a2b3c4d
  git log -p HEAD..refs/k8e/run-1a2b3c4d/heads/main
  git merge refs/k8e/run-1a2b3c4d/heads/main
"""

DAEMON = """\
One daemon owns the sandboxes of this machine. Commands start it when it is not there; sandboxes live on without it.

  agentkernel daemon start                   and has ready what [daemon] of your configuration says
  agentkernel daemon status
  agentkernel daemon prewarm --mode claude
  agentkernel daemon stop
"""

MCP = """\
Serves the sandboxes of this machine to an agent, by the Model Context Protocol. Each connection has a session of its
own, which ends with it. `agentkernel plugin install claude` tells an agent to start it.
"""

INIT = """\
Writes an agentkernel.toml for the project in this folder. One that is there already is left alone.

  agentkernel init
  agentkernel init --compatibility-mode claude && agentkernel trust
"""

TRUST = """\
Lets the agentkernel.toml of a project ask for more than you do: mounts, hosts, an image, resources, warm sandboxes. It
shows all that the file opens and remembers the file by its place and content: when it changes, it is not trusted any
more.

  agentkernel trust
  agentkernel trust --list
  agentkernel trust --revoke
"""

PLUGIN = """\
Tells an agent about our sandboxes: an entry in its list of MCP servers, and for claude which tools may be used without
a question. Nothing else in its files is changed, and what was there before is kept beside them. Then the agent's own
program, where there is one, is asked whether it can connect.

  agentkernel plugin install claude
  agentkernel plugin install claude --global
  agentkernel plugin install codex --dry-run
  agentkernel plugin install gemini --uninstall
"""

AUDIT = """\
Shows who did what to which sandbox, and what sandboxes were refused: the last 100 events, oldest first. The log is
root's (audit.log and audit-refusals.log in the state directory).

  sudo agentkernel audit
  sudo agentkernel audit --sandbox my-sandbox --event refused
  sudo agentkernel audit --since 1h --json
"""
