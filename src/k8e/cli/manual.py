"""The texts of `k8e COMMAND --help`."""

from __future__ import annotations

ABOUT = """\
Run code in a sandbox of its own: nothing it does can hurt this machine.

  k8e sandbox run "print('hello')" --lang python
  k8e sandbox run 'make test' --raw --timeout 600
  echo 'ls -la' | k8e sandbox run

The first run on a machine makes a session and remembers it, so files and installed
packages are still there at the next one.
"""

SANDBOX = """\
Most people need only `run`:

  k8e sandbox run 'pip list'                     in your session, made when there is none
  k8e sandbox run 'pip list' --tenant web        in the session that is called web

A session with options of its own is made, used and destroyed by its id:

  SID=$(k8e sandbox create --memory 2g | jq -r .session_id)
  k8e sandbox write $SID /workspace/job.py < job.py
  k8e sandbox run 'python3 job.py' --session-id $SID
  k8e sandbox read $SID /workspace/result.json --raw
  k8e sandbox destroy $SID

Every command prints one JSON object; errors are JSON too, with a code and a hint.
Exit codes: 1 the request failed, 2 the service cannot be reached, and for run the command's own.
"""

RUN = """\
Runs code and prints what came of it as JSON: stdout, stderr, exit_code, session_id and more.
Without CODE it is read from standard input. The exit code is the command's own; 124 is a timeout,
128+n a signal. Ctrl-C ends the command in the sandbox.

  k8e sandbox run 'echo $((6*7))'
  k8e sandbox run "print(6*7)" --lang python | jq -r .stdout
  k8e sandbox run --lang python < script.py
  k8e sandbox run 'tar xz && make' --stdin --raw < source.tar.gz
  tail -f log | k8e sandbox run -i 'grep --line-buffered ERROR' --timeout 10m
  k8e sandbox run './train.sh' --background --timeout 1h
"""

SHELL = """\
Opens a shell in a session at this terminal: bash, or sh where there is no bash, in /workspace. The exit
code is the shell's own. Ctrl-p ctrl-q leaves the shell running, and so does anything that ends this command
or its connection; the next `shell` comes back to it and shows its last output again. A shell that was left
ends with its session, which it does not keep from expiring.

  k8e sandbox shell SID
  k8e sandbox shell SID --command htop --user root
  k8e sandbox shell SID --new                     another one
  k8e sandbox shell SID --attach RUN-ID           one of several, or one that is open elsewhere
"""

HOSTS = """\
Shows what a session may reach, or changes it, at once and for what runs in it as well. Entries are
names, names of all subdomains, addresses or blocks of them, with a port or for 80 and 443; several
are separated by commas.

  k8e sandbox allow-hosts SID
  k8e sandbox allow-hosts SID --add api.example.com,*.example.org
  k8e sandbox allow-hosts SID --remove api.example.com --add 192.0.2.0/24:5432
  k8e sandbox allow-hosts SID --hosts git.example.com:22
  k8e sandbox allow-hosts SID --clear
"""

DESTROY = """\
Ends a session with all that is in it, or with --all every one of yours, after asking. Root's are root's own
unless --owner says whose; through a gateway they are those of your tenants.

  k8e sandbox destroy SID
  k8e sandbox destroy --all
  k8e sandbox destroy --all --yes
"""

COPY = """\
Copies a file, or a folder with everything in it, into a session or out of it. A PATH that does not begin with
/ begins in /workspace. Into a folder that is there already, or a destination that ends in /, it is copied
under its own name. Permissions are kept; links and special files are left out, and named (exit code 1).

  k8e sandbox cp data/ SID:
  k8e sandbox cp SID:results/report.pdf .
  k8e sandbox cp SID:results ./results
"""

MKDIR = """\
Makes a directory in a session, and those above it that are missing. One that is there is fine.
"""

LOGS = """\
Prints what a background run has written, byte for byte: its stdout on stdout, its stderr on stderr. With
--follow it goes on until the run has ended, and exits with the run's own code; Ctrl-C leaves the run alone.

  RUN=$(k8e sandbox run 'make all' --background --timeout 1h | jq -r .run_id)
  k8e sandbox logs $RUN --follow
"""

SUBAGENT = """\
Makes a session for a sub-agent and prints its id. It has processes, limits and a /tmp of its own, and its
parent's /workspace, live in both directions. It can do nothing that its parent cannot, has no sub-agents
itself, and ends with its parent.

  SUB1=$(k8e sandbox subagent PARENT-SID | jq -r .session_id)
  SUB2=$(k8e sandbox subagent PARENT-SID --agent-type reviewer --read-only | jq -r .session_id)
  k8e sandbox run 'python3 task_a.py' --session-id $SUB1 --raw &
  k8e sandbox run 'python3 task_b.py' --session-id $SUB2 --raw &
  wait
"""

START = """\
Brings a stopped session back on its own files, also after a reboot: a session that was made with --persistent.
Variables that it had it has again, but for secrets, which no disk has: they have to be given again.

  SID=$(k8e sandbox create --persistent --secret TOKEN | jq -r .session_id)
  k8e sandbox stop $SID
  k8e sandbox start $SID --secret TOKEN
"""

CONFIRM = """\
Asks a person whether something may be done, and waits for the answer. The command with which they approve
it is printed on stderr; the user whose program asks cannot approve it (docs/approvals.md). Exits with 0 when
it was approved, with 1 when it was rejected or not answered in time.

  k8e sandbox confirm SID 'delete /workspace/data' && k8e sandbox run 'rm -r data' --session-id SID
  k8e sandbox confirm SID 'send the report' --no-wait
  k8e sandbox approvals appr-0123456789abcdef
"""

APPROVE = """\
Answers what a program asked with `confirm`, as another user than the one whose program asked: root answers for users,
the key of a person (--key, typed at the terminal) for root. docs/approvals.md says how to have one.

  k8e sandbox approvals
  sudo k8e sandbox approve appr-0123456789abcdef --reason 'it is a copy'
  sudo k8e sandbox approve appr-0123456789abcdef --reject
  k8e sandbox approve --key appr-0123456789abcdef
"""

SKILL = """\
Tells agents on this machine about sandboxes: puts an entry into their list of MCP servers, and a skill where they look
for skills. Nothing else in their files is changed, and what was there before is kept beside them. Then the agent's own
program, where there is one, is asked whether it can connect.

  k8e sandbox-install-skill all
  k8e sandbox-install-skill claude --dry-run
  k8e sandbox-install-skill all --uninstall
  K8E_SANDBOX_MCP_ADDR=:8811 k8e sandbox-install-skill all       a server that runs already, instead of a command
"""

SERVER = """\
Runs the daemon in the foreground until Ctrl-C or SIGTERM. Sandboxes live on without it.
You rarely need this: as root, the first command starts the daemon by itself, and `k8e doctor --fix`
makes it a service of systemd. Members of the group k8e may use the daemon, when there is that group.

  K8E_STATE_DIR   where sandboxes live (/var/lib/k8e)
  K8E_RUN_DIR     where the socket is (/run/k8e)
  K8E_CONFIG      the file with settings (/etc/k8e/k8e.toml, when it is there)

With --cluster it makes a Kubernetes cluster of this machine (docs/cluster.md) and serves its sandboxes on
port 50051.
The programs have to be there: `k8e cluster build`, or --bin-dir. Ctrl-C or SIGTERM ends them; pods go on.

  sudo k8e server --cluster
  sudo k8e server --cluster --disable-sandbox-matrix

  K8E_KUBECONFIG_OUTPUT   where the administrator's kubeconfig is written (/etc/k8e/k8e.yaml)
"""

AGENT = """\
Runs a worker in the foreground until Ctrl-C or SIGTERM; its pods go on. The first time it joins the cluster of
a server, by a token: that of /var/lib/k8e/server/node-token there, or one of `k8e cluster token create`. It
joins no other cluster than the token's own. Later it needs neither variable.

  sudo K8E_URL=https://SERVER:6443 K8E_TOKEN=K8E1... k8e agent

  K8E_URL          a server of the cluster
  K8E_TOKEN        the token
  K8E_TOKEN_FILE   a file that has it, instead
"""

CLUSTER = """\
A Kubernetes cluster out of machines that have none, with sandboxes on it (docs/cluster.md).

  sudo k8e cluster build                                    the programs; or --bin-dir of the next one
  sudo k8e server --cluster                                 on the first machine
  sudo K8E_URL=https://SERVER:6443 K8E_TOKEN=... k8e agent  on every other
  sudo k8e cluster status
"""

BUILD = """\
Builds upstream's programs from Go modules, at the versions and hashes that k8e pins, and the images that nodes need.
Go's own settings say where modules come from. What is built already is not built again; a build that was cut
off goes on. The result can be copied to machines of the same architecture; SHA256SUMS has the hash of every file.

  sudo k8e cluster build
  k8e cluster build --output ./programs
"""

TOKENS = """\
Tokens with which machines join, on a server, as root. A token is bound to the cluster's certificate authority; a
server's opens the authorities' keys, too.

  sudo k8e cluster token create --ttl 1h --description 'the new rack'
  sudo k8e cluster token create --server --ttl 1h
  sudo k8e cluster token list
  sudo k8e cluster token delete 4fk2p9
"""

BACKUP = """\
Writes a snapshot of etcd, with the keys of the authorities, to a file of root, and checks it. Servers do so by
themselves every twelve hours and keep six. Who has the file can be every user of the cluster.

  sudo k8e cluster backup
  sudo k8e cluster backup --output /mnt/safe/cluster.tar
  sudo k8e cluster backup --check /mnt/safe/cluster.tar
"""

RESTORE = """\
Makes this machine the only server of a cluster, as a backup has it. End all servers first; the others join again
afterwards, with the token in this one's server-token. The data that was here is kept, in etcd-before-restore.

  sudo systemctl stop k8e
  sudo k8e cluster restore /mnt/safe/cluster.tar
  sudo systemctl start k8e
"""

LEAVE = """\
Takes this machine out of its cluster: removes its node, and of a server its member of etcd; ends its programs and pods,
and removes what they left on this machine. It asks first, and refuses while sandboxes run here. The last server cannot
leave.

  sudo k8e cluster leave
  sudo k8e cluster leave --yes --with-sandboxes
"""

CLUSTER_UNINSTALL = """\
Takes the cluster off this machine: what `leave` removes of a worker; on a server the cluster itself, with all its data,
keys and sandboxes; the service, the programs, and what scripts/install.sh has installed. It asks first.

  sudo k8e cluster uninstall
  sudo k8e cluster uninstall --yes --with-sandboxes
"""

NODE_HELPER = """\
Runs the helper of a Kubernetes node in the foreground until Ctrl-C or SIGTERM: it applies the lists of hosts of
the sandboxes on that node, and tells gateways what was refused. Rules stay in force without it.
The DaemonSet of deploy/kubernetes/node-helper.yaml starts it on every node (docs/kubernetes-egress.md).
"""

DOCTOR = """\
Tries every runtime and control for real, in sandboxes that are thrown away, and says what works here,
how it was tried, and what to install. Exits with 1 when the default would not be safe.

With --fix it first completes the installation, for every user of this machine (docs/install.md): packages,
gVisor, the tools of sandboxes, the program in /usr/local/lib/k8e, its commands, the service of systemd, the
group k8e, completions and man pages. It removes what engines left that are dead (sandboxes, mounts, groups,
rules), and says each step. It never touches what is alive. After an upgrade, run it again.

With --engine kubernetes it tries a cluster instead (docs/kubernetes.md): the API, the rights of the account,
what the namespace admits, RuntimeClasses, and a sandbox of each runtime, with the network policy between two.
"""

UNINSTALL = """\
Takes everything back that `k8e doctor --fix` has installed: the service, commands, program, completions, man
pages, the group k8e if it was made then, and the state directory with the tools of sandboxes. It asks first,
and refuses while there are sessions. What it leaves, it names: packages of the system, settings, the
environment of pipx or uv.

  sudo k8e uninstall
  sudo k8e uninstall --yes --with-sessions
  sudo k8e uninstall --keep-state
"""

IMAGE = """\
What sandboxes can be made of, besides this machine's own tools. Names are docker's. Who you are at a registry is read
from what `docker login` or `podman login` left (docs/images.md).

  k8e image pull python:3.12-slim
  k8e sandbox create --image python:3.12-slim
  docker save mine:1 | k8e image import -
  sudo k8e image build-base
  sudo k8e image build-guest --without /usr/lib/jvm
"""

KEYS = """\
Keys with which programs on other machines use this machine's sandboxes (docs/gateway.md).

  k8e sandbox-apikey create ci --ttl 30d
  k8e sandbox-apikey list
  k8e sandbox-apikey delete ci
"""

MCP = """\
Serves the sandboxes of this machine to an agent, by the Model Context Protocol, on standard input and
output, or over HTTP to many. Each connection has a session of its own, which ends with it.

  claude mcp add k8e-sandbox -- k8e sandbox-mcp
  k8e sandbox-mcp --http --http-addr :8811
  k8e sandbox-mcp --http --http-addr 0.0.0.0:8811       other machines too: TLS, and an API key of each agent
  k8e sandbox-mcp --endpoint sandbox.example.com:50051  the sandboxes of a gateway
"""

CONNECT = """\
Checks that a gateway is the one that your API key is for, exchanges the key for a certificate, and remembers
both under a name. The key is read from standard input or K8E_SANDBOX_APIKEY, and is not stored.

  k8e connect sandbox.example.com:50051
  k8e sandbox run 'uname -a'
"""

LOGIN = """\
A new certificate for a gateway that is known already: with K8E_SANDBOX_APIKEY by that key, else by the certificate that
there is. You rarely need this: commands renew it when a third of its life is left.
"""
