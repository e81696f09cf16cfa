"""The program of tests inside a sandbox: a list of attempts (JSON, the only argument), a list of their results.

Each result is `{"ok": ...}` or `{"error": NAME}`, with the name of the errno, or of the resolver's own error. It stands
alone: only the standard library, and no file of ours is there.
"""

import errno
import json
import os
import socket
import ssl
import struct
import sys
from typing import Any

PATIENCE = 20  # nothing waits that long unless it is wrong
TYPES = {"A": 1, "TXT": 16, "AAAA": 28, "SVCB": 64, "HTTPS": 65, "ANY": 255, "NULL": 10}


def read_page(connection: socket.socket, path: str) -> Any:
    connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return json.loads(data.partition(b"\r\n\r\n")[2])


def try_tcp(host: str, port: int, path: str = "/") -> Any:
    with socket.create_connection((host, port), timeout=PATIENCE) as connection:
        return read_page(connection, path)


def try_every(name: str, port: int) -> Any:
    """Each address of a name on its own."""
    reached = []
    for family, _, _, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(address)
            reached.append(read_page(connection, "/")["address"])
    return sorted(reached)


def try_numeric(spelling: str, port: int) -> Any:
    """As a C program would take it: decimal, octal, hexadecimal, or fewer than four numbers."""
    packed = socket.inet_aton(spelling)
    return try_tcp(socket.inet_ntoa(packed), port)


def try_mapped(address: str, port: int) -> Any:
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE)
        connection.connect((address, port))
        return read_page(connection, "/")


def try_tls(name: str, port: int, authority: str) -> Any:
    context = ssl.create_default_context(cadata=authority)
    with (
        socket.create_connection((name, port), timeout=PATIENCE) as connection,
        context.wrap_socket(connection, server_hostname=name) as tls,
    ):
        return read_page(tls, "/")


def try_scoped(address: str, port: int) -> Any:
    """A link-local address, on every interface."""
    found = {}
    for number, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as connection:
            connection.settimeout(1)
            try:
                connection.connect((address, port, 0, number))
                found[name] = "reached"
            except OSError as error:
                found[name] = type(error).__name__
    return found


def try_from(source: str, address: str, port: int) -> Any:
    """From an address that is not the sandbox's. Such packets are dropped without an answer: not long."""
    six = ":" in address
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(2)
        if six:
            connection.setsockopt(socket.IPPROTO_IPV6, 78, 1)  # IPV6_FREEBIND
        else:
            connection.setsockopt(socket.IPPROTO_IP, 15, 1)  # IP_FREEBIND
        connection.bind((source, 0))
        connection.connect((address, port))
        return read_page(connection, "/")


def try_configure(name: str, address: str) -> Any:
    """Another address for an interface, in the old way."""
    import fcntl

    request = struct.pack("16sH2x4s8x", name.encode(), socket.AF_INET, socket.inet_aton(address))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8916, request)  # SIOCSIFADDR
        return "changed"


def try_netlink(address: str) -> Any:
    """Another address for the second interface, in the new way: 0, or an errno."""
    body = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, 2) + struct.pack("=HH4s", 8, 2, socket.inet_aton(address))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as control:
        control.settimeout(PATIENCE)
        control.send(struct.pack("=IHHII", 16 + len(body), 20, 0x0605, 1, 0) + body)  # RTM_NEWADDR
        (result,) = struct.unpack("=i", control.recv(4096)[16:20])
    if result:
        raise OSError(-result, "netlink")
    return "changed"


def try_lookup(name: str) -> Any:
    found = socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)
    return sorted({address[0] for _, _, _, _, address in found})


def try_udp(address: str, port: int) -> Any:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(PATIENCE)
        client.connect((address, port))
        client.send(b"hello")
        return client.recv(100).decode()


def try_datagram(address: str, port: int) -> Any:
    """Sent, and nothing waited for."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        return client.sendto(b"hello", (address, port))


def try_ping(address: str) -> Any:
    """With the kernel's ping socket. gVisor has it, and keeps to itself that the packet was refused: not long."""
    six = ":" in address
    family, protocol = (socket.AF_INET6, 58) if six else (socket.AF_INET, 1)
    with socket.socket(family, socket.SOCK_DGRAM, protocol) as client:
        client.settimeout(1)
        client.connect((address, 0))
        client.send(bytes([128 if six else 8, 0, 0, 0, 0, 0, 0, 0]))
        return client.recv(100)[0]


def try_socket(family: str, kind: str, protocol: int) -> Any:
    with socket.socket(getattr(socket, family), getattr(socket, kind), protocol):
        return "made"


def try_raw(address: str, protocol: int) -> Any:
    """A packet of one's own making."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_RAW, protocol) as client:
        client.sendto(b"\x08\0\xf7\xff\0\0\0\0", (address, 0))
        return "sent"


def make_question(labels: list[str], kind: str) -> bytes:
    """`labels` may hold any bytes, as latin-1."""
    name = b"".join(bytes([len(label)]) + label for label in (text.encode("latin-1") for text in labels))
    return struct.pack("!HHHHHH", 4711, 0x0100, 1, 0, 0, 0) + name + b"\0" + struct.pack("!HH", TYPES[kind], 1)


def try_dns(server: str, labels: list[str], kind: str, transport: str = "udp") -> Any:
    """The rcode and how many records came. `server` empty: the sandbox's own."""
    if not server:
        with open("/etc/resolv.conf") as file:
            server = next(line.split()[1] for line in file if line.startswith("nameserver"))
    question = make_question(labels, kind)
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM if transport == "udp" else socket.SOCK_STREAM) as client:
        client.settimeout(PATIENCE)
        client.connect((server, 853 if transport == "tls" else 53))
        if transport == "udp":
            client.send(question)
            reply = client.recv(65535)
        else:
            client.sendall(struct.pack("!H", len(question)) + question)
            reply = client.makefile("rb").read(2 + 12)[2:]
    flags, _, answers = struct.unpack("!HHH", reply[2:8])
    return {"rcode": flags & 15, "answers": answers}


def try_write(path: str, text: str) -> Any:
    with open(path, "w") as file:
        file.write(text)
    return os.path.getsize(path)


def attempt(name: str, *arguments: Any) -> dict[str, Any]:
    try:
        return {"ok": globals()[f"try_{name}"](*arguments)}
    except socket.gaierror as error:
        names = {value: key for key, value in vars(socket).items() if key.startswith("EAI_")}
        return {"error": names.get(error.errno, str(error.errno))}
    except UnicodeError:
        return {"error": "UNICODE"}
    except TimeoutError as error:
        return {"error": "ETIMEDOUT" if error.errno else "SILENCE"}
    except ssl.SSLError as error:
        return {"error": f"TLS {error.reason}"}
    except OSError as error:
        return {"error": errno.errorcode.get(error.errno or 0, repr(error))}
    except ValueError as error:
        return {"error": repr(error)}


sys.stdout.write(json.dumps([attempt(*each) for each in json.loads(sys.argv[1])]))
