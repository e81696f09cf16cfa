"""Whether the gRPC contract is well kept: all documented and named alike, nothing changed that clients rely on.

    scripts/check_proto.py            part of `make lint`
    scripts/check_proto.py --record   puts what was added on record; refuses when anything on record is gone

proto/surface.txt is the record: every message, field number, type and method that was ever released. Adding is fine;
what stands there stays.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

ROOT = Path(__file__).resolve().parent.parent
SURFACE = ROOT / "proto" / "surface.txt"

_MESSAGE = re.compile(r"[A-Z][A-Za-z0-9]*")
_FIELD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_VALUE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
# Where a method may take a message that is not named after it.
_SHARED = {"ExecStream": ("ExecRequest", "ExecFrame"), "ExecInteractive": ("ExecInput", "ExecFrame")}

# Numbers of fields in descriptor.proto, which is how comments say what they belong to.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _VALUES, _METHODS, _ONEOFS = 2, 2, 2, 8


def compile_file(folder: Path, source: str) -> FileDescriptorProto:
    with tempfile.NamedTemporaryFile() as output:
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={output.name}", source], check=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(Path(output.name).read_bytes())
    return files.file[0]


def describe_type(field: FieldDescriptorProto) -> str:
    name = field.type_name.lstrip(".") or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def list_surface(file: FileDescriptorProto) -> Iterator[str]:
    """One line for each promise."""
    for message in file.message_type:
        yield from list_message(message, message.name)
    for enum in file.enum_type:
        for value in enum.value:
            yield f"value {enum.name} {value.number} {value.name}"
    for service in file.service:
        for method in service.method:
            takes = ("stream " if method.client_streaming else "") + method.input_type.lstrip(".")
            gives = ("stream " if method.server_streaming else "") + method.output_type.lstrip(".")
            yield f"method {file.package}.{service.name}/{method.name} {takes} -> {gives}"


def list_message(message: DescriptorProto, name: str) -> Iterator[str]:
    yield f"message {name}"
    for field in message.field:
        plain_oneof = field.HasField("oneof_index") and not field.proto3_optional
        group = f" in {message.oneof_decl[field.oneof_index].name}" if plain_oneof else ""
        yield f"field {name} {field.number} {field.name} {describe_type(field)}{group}"
    for nested in message.nested_type:
        yield from list_message(nested, f"{name}.{nested.name}")


def find_faults(file: FileDescriptorProto) -> Iterator[str]:
    """Returns what is not documented, or not named like the rest."""
    documented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}

    def check(path: tuple[int, ...], pattern: re.Pattern[str], name: str, where: str) -> Iterator[str]:
        if not pattern.fullmatch(name):
            yield f"{where}: {name!r} is not named like the others"
        if path not in documented:
            yield f"{where}: has no comment"

    for index, message in enumerate(file.message_type):
        place = (_MESSAGES, index)
        yield from check(place, _MESSAGE, message.name, message.name)
        for number, field in enumerate(message.field):
            yield from check((*place, _FIELDS, number), _FIELD, field.name, f"{message.name}.{field.name}")
        for number, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):
                yield from check((*place, _ONEOFS, number), _FIELD, oneof.name, f"{message.name}.{oneof.name}")
    for index, enum in enumerate(file.enum_type):
        yield from check((_ENUMS, index), _MESSAGE, enum.name, enum.name)
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        if enum.value[0].name != f"{prefix}_UNSPECIFIED":
            yield f"{enum.name}: begins with {enum.value[0].name}, not with {prefix}_UNSPECIFIED"
        for number, value in enumerate(enum.value):
            yield from check((_ENUMS, index, _VALUES, number), _VALUE, value.name, f"{enum.name}.{value.name}")
    for index, service in enumerate(file.service):
        yield from check((_SERVICES, index), _MESSAGE, service.name, service.name)
        for number, method in enumerate(service.method):
            yield from check((_SERVICES, index, _METHODS, number), _MESSAGE, method.name, method.name)
            expected = _SHARED.get(method.name, (f"{method.name}Request", f"{method.name}Response"))
            if (method.input_type.rpartition(".")[2], method.output_type.rpartition(".")[2]) != expected:
                yield f"{method.name}: takes and gives {expected[0]} and {expected[1]}, or is listed as an exception"


def compare(recorded: set[str], found: set[str]) -> Iterator[str]:
    yield from (f"gone or changed, and clients rely on it: {line}" for line in sorted(recorded - found))


def main(arguments: list[str]) -> int:
    file = compile_file(ROOT / "proto", "sandbox/v1/sandbox.proto")
    found = list(list_surface(file))
    recorded = set(SURFACE.read_text().splitlines()) if SURFACE.exists() else set()
    faults = [*find_faults(file), *compare(recorded, set(found))]
    if "--record" in arguments and not faults:
        SURFACE.write_text("".join(line + "\n" for line in found))
    elif added := sorted(set(found) - recorded):
        faults += [f"new, and not on record yet (scripts/check_proto.py --record): {line}" for line in added]
    for fault in faults:
        print(f"proto: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
