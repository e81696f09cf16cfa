#!/bin/sh
# Installs k8e and the programs of a cluster on this machine, as a service of systemd (docs/cluster.md).
#
#   INSTALL_K8E_SOURCE=/mnt/k8e sh install.sh                                     the first server
#   INSTALL_K8E_SOURCE=/mnt/k8e K8E_URL=https://SERVER:6443 K8E_TOKEN=... sh install.sh     a worker
#
#   INSTALL_K8E_SOURCE      a folder, or an address (https://...), that has SHA256SUMS and the files that it lists, as
#                           `make cluster-release` writes them. There is no default: nothing is fetched from elsewhere.
#   INSTALL_K8E_SHA256      the hash of SHA256SUMS, from a place that you trust. An http:// address needs it.
#   INSTALL_K8E_EXEC        what the service runs: `server` (default), `agent` (default with K8E_URL), and options
#   INSTALL_K8E_SKIP_START  set: the service is not started
#   K8E_URL, K8E_TOKEN, K8E_KUBECONFIG_OUTPUT    as of `k8e agent` and `k8e server --cluster`
#
# Every file is compared with its hash before anything on this machine is changed. `k8e cluster uninstall` takes
# everything back.
set -eu

home=/usr/local/lib/k8e-cluster
program=/usr/local/bin/k8e
unit=/etc/systemd/system/k8e.service
variables=/etc/k8e/cluster.env
mark='# Written by install.sh of k8e.'
stage=''

say() { echo "install: $*"; }

fail() {
    echo "install: $1" >&2
    echo "  hint: $2" >&2
    exit 1
}

# Of everything that was begun, nothing is left.
clean() { if [ -n "$stage" ]; then rm -rf "$stage"; fi; }
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

fetch() { # NAME TARGET
    case "$source" in
        /*) cp -- "$source/$1" "$2" 2>/dev/null || return 1 ;;
        https://*) curl --fail --silent --show-error --location --proto '=https' --output "$2" "$source/$1" || return 1 ;;
        http://*) curl --fail --silent --show-error --proto '=http' --output "$2" "$source/$1" || return 1 ;;
    esac
}

check_machine() {
    [ "$(id -u)" = 0 ] || fail 'only root installs for the whole machine' 'sudo'
    [ "$(uname -s)" = Linux ] || fail 'a cluster needs Linux' 'on other systems use the gateway of a cluster: k8e connect'
    for tool in sha256sum tar; do
        command -v "$tool" >/dev/null || fail "$tool is missing" 'install coreutils and tar'
    done
    [ -x /usr/bin/python3 ] || fail 'there is no /usr/bin/python3' 'install the package python3 of your distribution, 3.11 or newer'
    if [ -e "$unit" ] && ! grep -qF "$mark" "$unit"; then
        fail "$unit is there and not of this installer" 'move it away, or first: k8e uninstall'
    fi
    if { [ -e "$program" ] || [ -L "$program" ]; } && [ "$(readlink "$program")" != "$home/k8e/bin/k8e" ]; then
        fail "$program is there and not of this installer" 'move it away, or first: k8e uninstall'
    fi
}

check_source() {
    source=${INSTALL_K8E_SOURCE:-}
    source=${source%/}
    case "$source" in
        '') fail 'INSTALL_K8E_SOURCE is not set' 'a folder or an https:// address that has SHA256SUMS: nothing is fetched from anywhere else' ;;
        /*) [ -d "$source" ] || fail "$source is no folder" 'INSTALL_K8E_SOURCE names the folder that has SHA256SUMS' ;;
        https://*) ;;
        http://*)
            [ -n "${INSTALL_K8E_SHA256:-}" ] || fail 'http:// can be changed on the way' 'INSTALL_K8E_SHA256=HASH, of SHA256SUMS; or https://'
            ;;
        *) fail "$source is neither an absolute path nor an address" 'INSTALL_K8E_SOURCE=/mnt/k8e, or https://...' ;;
    esac
    case "$source" in
        http*) command -v curl >/dev/null || fail 'curl is missing' 'install curl, or name a folder' ;;
    esac
}

choose_command() {
    words=${INSTALL_K8E_EXEC:-}
    if [ -z "$words" ]; then
        words=server
        if [ -n "${K8E_URL:-}" ]; then words=agent; fi
        # An upgrade of a worker, without variables.
        if [ -e /var/lib/k8e/agent/membership.json ] && [ ! -e /var/lib/k8e/server/authorities ]; then words=agent; fi
    fi
    case "${K8E_URL:-}${K8E_TOKEN:-}${K8E_KUBECONFIG_OUTPUT:-}" in
        *[!A-Za-z0-9./:@%+=_-]*) fail 'K8E_URL, K8E_TOKEN or K8E_KUBECONFIG_OUTPUT has characters that a unit cannot have' 'K8E_URL=https://SERVER:6443' ;;
    esac
    case "$words" in
        *[!A-Za-z0-9\ ./:=_-]*) fail 'INSTALL_K8E_EXEC has characters that a unit cannot have' 'such as: server --node-ip 192.0.2.10' ;;
    esac
    case "$words" in
        server | server\ *)
            case " $words " in
                *' --cluster '*) ;;
                *) words="server --cluster${words#server}" ;;
            esac
            ;;
        agent | agent\ *)
            if [ ! -e /var/lib/k8e/agent/membership.json ] && { [ -z "${K8E_URL:-}" ] || [ -z "${K8E_TOKEN:-}" ]; }; then
                fail 'a worker needs K8E_URL and K8E_TOKEN' 'the token is in /var/lib/k8e/server/node-token of the first server'
            fi
            ;;
        *) fail "INSTALL_K8E_EXEC begins with neither server nor agent: $words" 'leave it out for a server' ;;
    esac
}

# Into a folder beside the last one: it is put in place by a rename.
fetch_all() {
    mkdir -p "${home%/*}"
    stage=$(mktemp -d "$home.new-XXXXXX")
    chmod 0755 "$stage"
    fetch SHA256SUMS "$stage/SHA256SUMS" || fail "there is no SHA256SUMS at $source" 'make cluster-release writes it'
    if [ -n "${INSTALL_K8E_SHA256:-}" ]; then
        echo "$INSTALL_K8E_SHA256  $stage/SHA256SUMS" | sha256sum --check --status \
            || fail 'SHA256SUMS is not the one that INSTALL_K8E_SHA256 names' 'is the source the right one? Nothing was installed'
    fi
    while read -r hash name; do
        case "$name" in
            '' | /* | *..* | *[!A-Za-z0-9._/-]*) fail "SHA256SUMS names a file that cannot be: $name" 'the source is damaged. Nothing was installed' ;;
        esac
        mkdir -p "$(dirname "$stage/$name")"
        fetch "$name" "$stage/$name" || fail "$name cannot be fetched from $source" 'is the folder complete? Nothing was installed'
        echo "$hash  $stage/$name" | sha256sum --check --status \
            || fail "$name is not what SHA256SUMS says" 'it was changed or cut off. Nothing was installed'
        chmod 0755 "$stage/$name"
    done < "$stage/SHA256SUMS"
    [ -f "$stage/k8e.tar.gz" ] || fail 'the source has no k8e.tar.gz' 'make cluster-release writes it'
    tar --extract --gzip --no-same-owner --file "$stage/k8e.tar.gz" --directory "$stage"
    rm "$stage/k8e.tar.gz"
    chown -R 0:0 "$stage"
    chmod -R go-w "$stage"
    "$stage/k8e/bin/k8e" --version >/dev/null || fail 'the program of the source does not run here' 'it was built for another distribution or architecture. Nothing was installed'
}

put_in_place() {
    printf '%s\n' "$program" "$unit" "$variables" > "$stage/installed"
    if [ -e "$home" ]; then
        rm -rf "$home.old"
        mv "$home" "$home.old"
    fi
    mv "$stage" "$home"
    stage=''
    rm -rf "$home.old"
    mkdir -p "${program%/*}" /etc/k8e "${unit%/*}"
    ln -sfn "$home/k8e/bin/k8e" "$program"
    # An upgrade without variables keeps those that there are.
    if [ -n "${K8E_URL:-}${K8E_TOKEN:-}${K8E_KUBECONFIG_OUTPUT:-}" ] || [ ! -e "$variables" ]; then
        (
            umask 077
            {
                [ -z "${K8E_URL:-}" ] || echo "K8E_URL=$K8E_URL"
                [ -z "${K8E_TOKEN:-}" ] || echo "K8E_TOKEN=$K8E_TOKEN"
                [ -z "${K8E_KUBECONFIG_OUTPUT:-}" ] || echo "K8E_KUBECONFIG_OUTPUT=$K8E_KUBECONFIG_OUTPUT"
            } > "$variables.new"
        )
        mv "$variables.new" "$variables"
    fi
    cat > "$unit" <<UNIT
$mark
[Unit]
Description=k8e: a member of a Kubernetes cluster, with sandboxes
Documentation=file:///usr/local/lib/k8e-cluster/
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
EnvironmentFile=-$variables
ExecStart=$program $words
Restart=always
RestartSec=5s
# Only the supervisor: it ends its programs, and pods go on.
KillMode=process
TimeoutStopSec=120s
Delegate=yes
LimitNOFILE=1048576
LimitNPROC=infinity
TasksMax=infinity

[Install]
WantedBy=multi-user.target
UNIT
}

start_service() {
    if [ ! -d /run/systemd/system ]; then
        say "systemd does not run here: $program $words"
    elif [ -n "${INSTALL_K8E_SKIP_START:-}" ]; then
        systemctl daemon-reload
        systemctl enable --quiet k8e
        say 'installed; start it: systemctl start k8e'
    else
        systemctl daemon-reload
        systemctl enable --quiet k8e
        systemctl restart k8e
        say 'started; look at it: k8e cluster status, journalctl -u k8e'
    fi
}

check_machine
check_source
choose_command
say "every file of $source is compared with its hash"
fetch_all
put_in_place
start_service
