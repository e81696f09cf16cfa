"""A model on loopback, in the three protocols that AI agents speak to theirs. It asks for one call of a tool, and ends
the turn when it has the result. It answers as the providers' documents say; nothing is checked that the AI agents do
not need."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FINISHED = "The result has arrived."
WAIT = "WaitForMcpServers"  # Claude Code begins without a server that takes more than some seconds, and has this tool


@dataclass(frozen=True, slots=True)
class Call:
    """The tool that is asked for: the end of its name, as AI agents put the server's before it, and its arguments."""

    tool: str
    arguments: dict[str, Any]


@dataclass
class Model:
    """`requests` has what the AI agent sent, and `results` the results of the call, as text."""

    call: Call
    url: str = ""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    offered: set[str] = field(default_factory=set)

    def answer(self, path: str, body: Any) -> tuple[str, bytes]:
        """The type of the content, and the content."""
        self.requests.append((path, body))
        for end, answer in ANSWERS.items():
            if path.endswith(end):
                return answer(self, body)
        return "application/json", b"{}"

    def find_tool(self, names: list[str]) -> str | None:
        self.offered.update(names)
        return next((name for name in names if name.endswith(self.call.tool)), None)


def answer_anthropic(model: Model, body: Any) -> tuple[str, bytes]:
    blocks = [block for message in body["messages"] for block in list_blocks(message["content"])]
    results = [block for block in blocks if block["type"] == "tool_result" and block["tool_use_id"] == "toolu_1"]
    model.results += [read_text(block["content"]) for block in results]
    names = [tool["name"] for tool in body.get("tools", ())]
    tool, number, arguments = model.find_tool(names), "toolu_1", model.call.arguments
    if tool is None and WAIT in names:  # our server is not ready yet
        tool, number, arguments = WAIT, f"toolu_{len(model.requests)}_wait", {}
    block: dict[str, Any] = {"type": "text", "text": FINISHED}
    delta: dict[str, Any] = {"type": "text_delta", "text": FINISHED}
    reason = "end_turn"
    if tool is not None and not results:
        block = {"type": "tool_use", "id": number, "name": tool, "input": arguments}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
        reason = "tool_use"
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
    if not body.get("stream"):
        whole = {**message, "content": [block], "stop_reason": reason, "usage": usage}
        return "application/json", json.dumps(whole).encode()
    begun = {**block, "input": {}} if block["type"] == "tool_use" else {**block, "text": ""}
    return events(
        {"type": "message_start", "message": {**message, "content": [], "stop_reason": None, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": begun},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    )


def answer_openai(model: Model, body: Any) -> tuple[str, bytes]:
    results = [item for item in body["input"] if item.get("type") == "function_call_output"]
    model.results += [read_text(item["output"]) for item in results]
    # The tools of a server stand by themselves, or together in a namespace.
    found = [(tool.get("name", ""), "") for tool in body.get("tools", ())]
    for group in body.get("tools", ()):
        found += [(tool["name"], group["name"]) for tool in group.get("tools", ())]
    model.offered.update(name for name, _ in found)
    wanted = next((each for each in found if each[0].endswith(model.call.tool)), None)
    item: dict[str, Any] = {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "content": [{"type": "output_text", "text": FINISHED}],
    }
    if wanted is not None and not results:
        name, namespace = wanted
        item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": name}
        item |= {"arguments": json.dumps(model.call.arguments), **({"namespace": namespace} if namespace else {})}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    return events(
        {"type": "response.created", "response": {"id": "resp_1"}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": "resp_1", "usage": usage}},
    )


def answer_google(model: Model, body: Any) -> tuple[str, bytes]:
    candidate = ask_google(model, body)
    return "text/event-stream", f"data: {json.dumps(candidate)}\n\n".encode()


def answer_google_at_once(model: Model, body: Any) -> tuple[str, bytes]:
    return "application/json", json.dumps(ask_google(model, body)).encode()


def ask_google(model: Model, body: Any) -> dict[str, Any]:
    parts = [part for content in body["contents"] for part in content["parts"]]
    results = [part["functionResponse"] for part in parts if "functionResponse" in part]
    model.results += [read_text(result["response"]) for result in results]
    declared = [each for tool in body.get("tools", ()) for each in tool.get("functionDeclarations", ())]
    tool = model.find_tool([each["name"] for each in declared])
    part: dict[str, Any] = {"text": FINISHED}
    if tool is not None and not results:
        part = {"functionCall": {"name": tool, "args": model.call.arguments}}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    content = {"role": "model", "parts": [part]}
    return {"candidates": [{"content": content, "finishReason": "STOP", "index": 0}], "usageMetadata": usage}


def count_google(model: Model, body: Any) -> tuple[str, bytes]:
    return "application/json", b'{"totalTokens": 1}'


def count_anthropic(model: Model, body: Any) -> tuple[str, bytes]:
    return "application/json", b'{"input_tokens": 1}'


ANSWERS: dict[str, Callable[[Model, Any], tuple[str, bytes]]] = {
    "/v1/messages": answer_anthropic,
    "/v1/messages/count_tokens": count_anthropic,
    "/v1/responses": answer_openai,
    ":streamGenerateContent": answer_google,
    ":generateContent": answer_google_at_once,
    ":countTokens": count_google,
}


def events(*messages: dict[str, Any]) -> tuple[str, bytes]:
    lines = (f"event: {message['type']}\ndata: {json.dumps(message)}\n\n" for message in messages)
    return "text/event-stream", "".join(lines).encode()


def list_blocks(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def read_text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


@contextlib.contextmanager
def serve_model(call: Call) -> Iterator[Model]:
    model = Model(call)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            self.reply(*model.answer(self.path.partition("?")[0], json.loads(body or b"null")))

        def do_GET(self) -> None:
            model.requests.append((self.path, None))
            self.reply("application/json", b"{}", 404)

        def do_HEAD(self) -> None:
            self.do_GET()

        def reply(self, kind: str, content: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    model.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield model
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
