"""The anonymous certificate: a client without a certificate of its own uses it to call `Login`, and nothing else.

gRPC for Python either requires client certificates on a port or does not ask for them. The gateway requires them, so
one is published together with its key. It proves nothing: the gateway treats its holder as unauthenticated. Every
client has the same (docs/gateway.md, sdk/), so it never changes.
"""

from __future__ import annotations

from typing import Final

CERTIFICATE: Final = """\
-----BEGIN CERTIFICATE-----
MIIBPjCB5qADAgECAgEBMAoGCCqGSM49BAMCMBUxEzARBgNVBAMMCms4ZSBub2Jv
ZHkwIBcNMjAwMTAxMDAwMDAwWhgPOTk5OTEyMzEyMzU5NTlaMBUxEzARBgNVBAMM
Cms4ZSBub2JvZHkwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAQzjk1c1Duxelb3
l77bFsjtKWpsd3lrFBdEJWRmEL6jAgR4dyno48Z8+sVtwCb7a9QI6VtKStEPs8bf
0Se5a2NjoyUwIzAMBgNVHRMBAf8EAjAAMBMGA1UdJQQMMAoGCCsGAQUFBwMCMAoG
CCqGSM49BAMCA0cAMEQCIC/NfbBtdz/41tKckGHOJxWb+d2Ha8BptCCoqoztQMEd
AiBXewdvxdGnsW4wOLDW5iZearjouaP/OGGDNtqw+G61Ng==
-----END CERTIFICATE-----
"""

KEY: Final = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgrHASSgmZw/WqHUbY
dRjQ7dluc+ZU2dAFaL9uyHm7a4KhRANCAAQzjk1c1Duxelb3l77bFsjtKWpsd3lr
FBdEJWRmEL6jAgR4dyno48Z8+sVtwCb7a9QI6VtKStEPs8bf0Se5a2Nj
-----END PRIVATE KEY-----
"""
