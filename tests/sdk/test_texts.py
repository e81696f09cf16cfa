"""The words of both SDKs: every public name says what it is for, and hints name what the library has."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import sandbox_client
from sandbox_client._errors import _ASKS, Effect, find_effect, translate
from sandbox_client._hints import HINTS
from tests.sdk.conftest import TYPESCRIPT

ROOT = TYPESCRIPT.parent.parent
# A command of k8e, or an option of one.
COMMAND = re.compile(r"\bk8e(-sandbox)? (sandbox|connect|login|image|doctor|server)|(^|[\s(`])--[a-z]")
# Of calls that the SDKs do not have: keys, terminals; images, but for `image_not_found`, which a new session can meet.
ELSEWHERE = {"key_not_found", "several_terminals", "terminal_detached", "terminal_not_found", "terminal_taken"}
IMAGES = "images.py"


def list_public() -> Iterator[tuple[str, object]]:
    for name in sandbox_client.__all__:
        value = getattr(sandbox_client, name)
        yield name, value
        if not inspect.isclass(value):
            continue
        for member, found in vars(value).items():
            if not member.startswith("_") and (callable(found) or isinstance(found, property | classmethod)):
                yield f"{name}.{member}", found


def test_every_public_name_of_the_python_sdk_is_explained() -> None:
    names = dict(list_public())
    assert len(names) > 90
    silent = [name for name, value in names.items() if not (getattr(value, "__doc__", None) or "").strip()]
    # A dataclass without a docstring gets its signature as one.
    silent += [name for name, value in names.items() if (value.__doc__ or "").startswith(f"{name}(")]
    assert silent == []
    assert [name for name, value in names.items() if (value.__doc__ or "").startswith("What")] == []


# Lists the names that index.ts exports, with their public members, that have no comment of their own.
WALK = """
import ts from "typescript";
const program = ts.createProgram([process.argv[1]], { module: ts.ModuleKind.NodeNext, target: ts.ScriptTarget.ES2022 });
const checker = program.getTypeChecker();
const module_ = checker.getSymbolAtLocation(program.getSourceFile(process.argv[1]));
const explained = (symbol) => symbol.getDocumentationComment(checker).length > 0;
const [names, silent] = [[], []];
for (const exported of checker.getExportsOfModule(module_)) {
  const symbol = exported.flags & ts.SymbolFlags.Alias ? checker.getAliasedSymbol(exported) : exported;
  const members = symbol.flags & ts.SymbolFlags.Class ? [...symbol.members.values()] : [];
  const open = members.filter((member) => {
    const [declaration] = member.declarations ?? [];
    const hidden = declaration && ts.getCombinedModifierFlags(declaration) & ts.ModifierFlags.Private;
    return declaration && !hidden && /^[a-z]/.test(member.name) && !ts.isConstructorDeclaration(declaration);
  });
  for (const [name, each] of [[symbol.name, symbol], ...open.map((one) => [`${symbol.name}.${one.name}`, one])]) {
    names.push(name);
    if (!explained(each)) silent.push(name);
  }
}
console.log(JSON.stringify({ names: names.length, silent }));
"""


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")
@pytest.mark.usefixtures("built")
def test_every_public_name_of_the_typescript_sdk_is_explained() -> None:
    command = ["node", "--input-type=module", "-e", WALK, str(TYPESCRIPT / "src" / "index.ts")]
    done = subprocess.run(command, cwd=TYPESCRIPT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["names"] > 80
    assert found["silent"] == []


def read_typescript_hints() -> dict[str, str]:
    text = (TYPESCRIPT / "src" / "hints.ts").read_text()
    table = text[text.index("HINTS") : text.index("};")]
    return dict(re.findall(r'^  (\w+): "?(.*?)"?,$', table, re.MULTILINE))


def test_both_sdks_have_hints_for_the_same_errors() -> None:
    assert set(read_typescript_hints()) == set(HINTS)
    for code, hint in {**HINTS, **read_typescript_hints()}.items():
        assert hint, code
        assert not COMMAND.search(hint), hint


def test_hints_name_methods_that_there_are() -> None:
    methods = {name for name in vars(sandbox_client.SandboxClient) if not name.startswith("_")}
    for hint in HINTS.values():
        for name in re.findall(r"\b([a-z_]+)\(", hint):
            assert name in methods, hint
    client = (TYPESCRIPT / "src" / "client.ts").read_text()
    for hint in read_typescript_hints().values():
        for name in re.findall(r"\b([a-z][A-Za-z]+)\(", hint):
            assert f"  async {name}(" in client, hint


MAKERS = {"Fault": 1, "_deny": 0}  # which of the arguments is the code


def find_commands_in_hints(path: Path) -> Iterator[str]:
    """The codes of the faults in a file whose hints name a command: given at the call, in a variable of the same
    function, or in a constant of the file."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        names = constants | {
            target.id: ast.unparse(node.value)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name not in MAKERS or len(call.args) <= MAKERS[name]:
                continue
            texts = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "hint"]
            texts += [ast.unparse(argument) for argument in call.args[MAKERS[name] + 2 :]]
            named = [names.get(word, "") for text in texts for word in re.findall(r"\w+", text)]
            if any(COMMAND.search(text.strip("'\"f")) for text in (*texts, *named)):
                code = call.args[MAKERS[name]]
                yield str(code.value) if isinstance(code, ast.Constant) else f"{path}:{call.lineno}"


def test_a_hint_of_the_daemon_that_names_a_command_is_not_shown_by_the_sdks() -> None:
    paths = [path for path in (ROOT / "src" / "k8e" / "core").rglob("*.py") if path.name != IMAGES]
    codes = {code for path in paths for code in find_commands_in_hints(path)}
    assert {"session_ambiguous", "session_stopped", "secrets_missing", "same_user"} <= codes
    assert "image_not_found" in HINTS
    assert codes - set(HINTS) - ELSEWHERE == set()


class BrokenCall(grpc.RpcError):
    """A call that failed without a word of the gateway."""

    def __init__(self, status: grpc.StatusCode, said: str) -> None:
        self._status, self._said = status, said

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._said

    def trailing_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("status", "said", "asks", "changes", "runs"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", "Unavailable", "Unavailable", "Unavailable"),
        ("UNAVAILABLE", "DNS resolution failed for x", "Unavailable", "Unavailable", "Unavailable"),
        ("UNAVAILABLE", "Socket closed", "Unavailable", "OutcomeUnknown", "RunLost"),
        ("UNAVAILABLE", "GOAWAY received", "Unavailable", "OutcomeUnknown", "RunLost"),
        ("CANCELLED", "CANCELLED", "Unavailable", "OutcomeUnknown", "RunLost"),
        ("UNKNOWN", "Stream removed", "Unavailable", "OutcomeUnknown", "RunLost"),
        ("INTERNAL", "RST_STREAM", "Unavailable", "OutcomeUnknown", "RunLost"),
        ("UNAVAILABLE", "Ssl handshake failed", "ServerNotTrusted", "ServerNotTrusted", "ServerNotTrusted"),
        ("DEADLINE_EXCEEDED", "", "DeadlineExceeded", "DeadlineExceeded", "DeadlineExceeded"),
        ("UNIMPLEMENTED", "", "Unsupported", "Unsupported", "Unsupported"),
    ],
)
def test_a_lost_answer_is_nothing_only_where_nothing_can_have_been_done(
    status: str, said: str, asks: str, changes: str, runs: str
) -> None:
    error = BrokenCall(grpc.StatusCode[status], said)
    seen = [type(translate(error, effect, "r1")).__name__ for effect in (Effect.ASKS, Effect.CHANGES, Effect.RUNS)]
    assert seen == [asks, changes, runs]


def test_a_call_that_is_not_known_counts_as_one_that_changes_something() -> None:
    assert [find_effect(name) for name in ("Status", "WriteFile", "Exec", "Other")] == [
        Effect.ASKS,
        Effect.CHANGES,
        Effect.RUNS,
        Effect.CHANGES,
    ]


def test_both_sdks_know_the_same_calls_that_only_ask() -> None:
    source = (TYPESCRIPT / "src" / "errors.ts").read_text()
    listed = re.search(r"const ASKS = new Set\((.*?)\);", source, re.DOTALL)
    assert listed is not None
    names = re.findall(r"\w+", listed[1])
    assert "GetTree" in names
    assert set(names) == _ASKS
