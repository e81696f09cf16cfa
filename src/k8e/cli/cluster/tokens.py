"""`k8e cluster token`: tokens with which machines join, asked on a server."""

from __future__ import annotations

import hashlib
import ssl
import time
from typing import TYPE_CHECKING

from k8e.cli.cluster.place import find_layout, open_admin, require_root, run
from k8e.cli.view import show_value
from k8e.cluster.member.servers.key_files import read_keys
from k8e.cluster.member.servers.server_tokens import create_server_token
from k8e.cluster.member.tokens import create_token, delete_token, list_tokens

if TYPE_CHECKING:
    import argparse


def create(options: argparse.Namespace) -> int:
    require_root("k8e cluster token create")
    layout = find_layout()
    api = open_admin(layout)
    authority = ssl.PEM_cert_to_DER_cert((layout.tls / "server-ca.crt").read_text())
    expires = None if options.ttl is None else time.time() + options.ttl
    fingerprint = hashlib.sha256(authority).hexdigest()
    if options.server:
        token = run(create_server_token(api, fingerprint, read_keys(layout), options.description, expires))
    else:
        token = run(create_token(api, fingerprint, options.description, expires))
    show_value({"ok": True, "id": token.id, "token": token.text, "expires_at": expires})
    return 0


def list_all(options: argparse.Namespace) -> int:
    require_root("k8e cluster token list")
    now = time.time()
    found = run(list_tokens(open_admin(find_layout())))
    show_value({"ok": True, "tokens": [{**each.body, "over": each.is_over(now)} for each in found]}, "tokens")
    return 0


def delete(options: argparse.Namespace) -> int:
    require_root("k8e cluster token delete")
    run(delete_token(open_admin(find_layout()), options.id))
    show_value({"ok": True, "id": options.id})
    return 0
