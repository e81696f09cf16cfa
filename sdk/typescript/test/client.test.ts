/** What the list cannot say: the client's own session, leaving early, the background, hosts. */
import { expect, test } from "vitest";

import { InvalidArgument, NotFound, SandboxClient, sandboxRun } from "../src/index.js";

const runtimeClass = process.env["K8E_TEST_RUNTIME"] ?? "";

test("runs share the client's own session, which closing destroys", async () => {
  const client = new SandboxClient();
  const [first, second] = await Promise.all([client.run("echo a > file"), client.run("true")]);
  const third = await client.run("cat file");
  expect(third.stdout).toBe("a\n");
  expect(new Set([first.sessionId, second.sessionId, third.sessionId]).size).toBe(1);
  await client.close();
  const other = new SandboxClient();
  await expect(other.getSession(first.sessionId)).rejects.toThrow(NotFound);
  await other.close();
}, 120_000);

test("a session that is gone is replaced, and the code is run once", async () => {
  const client = new SandboxClient();
  const first = await client.run("true");
  await client.destroySession(first.sessionId);
  const second = await client.run("echo x >> /workspace/count; cat /workspace/count");
  expect(second.stdout).toBe("x\n");
  expect(second.sessionId).not.toBe(first.sessionId);
  await client.close();
}, 120_000);

test.each([NaN, Infinity, 1e12, -100])("a timeout of %s is a mistake and not the end of the process", async (timeout) => {
  const client = new SandboxClient();
  await expect(client.exec("any", "true", timeout)).rejects.toThrow(InvalidArgument);
  await expect(client.execStream("any", "true", timeout)[Symbol.asyncIterator]().next()).rejects.toThrow(InvalidArgument);
  await client.close();
}, 120_000);

test("leaving a live run ends its command", async () => {
  const client = new SandboxClient();
  const sid = await client.createSession({ runtimeClass });
  for await (const chunk of client.execStream(sid, "echo $$; exec sleep 1000")) {
    expect(chunk.stream).toBe("stdout");
    expect(`${chunk}`).toMatch(/^\d+\n$/);
    break;
  }
  let seen = "";
  do {
    seen = (await client.exec(sid, "pgrep -x sleep || echo none")).stdout;
  } while (seen !== "none\n");
  await client.destroySession(sid);
  await client.close();
}, 120_000);

test("a run in the background is polled and killed", async () => {
  const client = new SandboxClient();
  const sid = await client.createSession({ runtimeClass });
  const started = await client.start(sid, "echo out; touch begun; sleep 1000");
  expect(started.exitCode).toBeNull();
  await client.exec(sid, "until [ -e begun ]; do sleep 0.05; done");
  expect((await client.poll(started.runId)).status).toBe("running");
  expect(await client.kill(started.runId)).toBe(true);
  expect(await client.kill(started.runId)).toBe(false);
  const ended = await client.poll(started.runId);
  expect(ended.status).toBe("killed");
  expect(ended.stdout).toBe("out\n");
  await client.destroySession(sid);
  await client.close();
}, 120_000);

test("an empty list is no command, and a text is no list", async () => {
  const client = new SandboxClient();
  await expect(client.exec("any", [])).rejects.toMatchObject({ code: "invalid_argument", field: "command" });
  expect(() => client.execStream("any", [])).toThrow(InvalidArgument);
  const text = "x" as unknown as string[];
  await expect(client.createSession({ allowedHosts: text })).rejects.toMatchObject({ field: "allowedHosts" });
  await expect(client.updateAllowedHosts("any", { add: text })).rejects.toThrow(InvalidArgument);
  await expect(client.pipInstall("any", text)).rejects.toThrow(InvalidArgument);
  await client.close();
});

test("what is neither text nor bytes is not sent as nothing", async () => {
  const client = new SandboxClient();
  for (const command of [["echo", 1], ["echo", undefined], 5, null, new Uint8Array(2)] as unknown as string[][]) {
    await expect(client.exec("any", command)).rejects.toMatchObject({ name: "InvalidArgument", field: "command" });
  }
  const number = 5 as unknown as string;
  await expect(client.exec("any", "cat", 30, { stdin: number })).rejects.toMatchObject({ field: "stdin" });
  await expect(client.writeFile("any", "x", number)).rejects.toMatchObject({ field: "content" });
  await client.close();
});

test("a closed client makes no session", async () => {
  const client = new SandboxClient();
  await client.run("true");
  await client.close();
  await client.close();
  await expect(client.run("true")).rejects.toMatchObject({ name: "Conflict", code: "client_closed" });
  await expect(client.status()).rejects.toMatchObject({ code: "client_closed" });
}, 120_000);

test("a character that is split between two pieces is in the text of the second", async () => {
  const client = new SandboxClient();
  const sid = await client.createSession({ runtimeClass });
  const code = "printf 'a\\342\\202'; touch half; until [ -e rest ]; do sleep 0.02; done; printf '\\254b\\377\\342'";
  const stream = client.execStream(sid, code);
  let text = "";
  let pieces = 0;
  for await (const chunk of stream) {
    if (!pieces++) {
      await client.exec(sid, "until [ -e half ]; do sleep 0.02; done; touch rest");
      expect(chunk.text).toBe("a");
    }
    text += chunk;
  }
  expect(pieces).toBeGreaterThan(1);
  expect(text).toBe("a\u20acb\ufffd\ufffd");
  await client.destroySession(sid);
  await client.close();
}, 120_000);

test("an aborted call ends at once with the signal's reason, and its command with it", async () => {
  const client = new SandboxClient();
  const sid = await client.createSession({ runtimeClass });
  const controller = new AbortController();
  const waiting = client.exec(sid, "touch begun; exec sleep 1003", 600, { signal: controller.signal });
  await client.exec(sid, "until [ -e begun ]; do sleep 0.02; done");
  controller.abort(new Error("enough"));
  await expect(waiting).rejects.toThrow("enough");
  let seen = "";
  do {
    seen = (await client.exec(sid, "pgrep -fx 'sleep 1003' || echo none")).stdout;
  } while (seen !== "none\n");
  await expect(client.status({ signal: AbortSignal.abort() })).rejects.toMatchObject({ name: "AbortError" });
  const live = new AbortController();
  await expect(async () => {
    for await (const chunk of client.execStream(sid, "echo x; exec sleep 1004", 600, { signal: live.signal })) {
      expect(chunk.text).toBe("x\n");
      live.abort();
    }
  }).rejects.toMatchObject({ name: "AbortError" });
  await client.destroySession(sid);
  await client.close();
}, 120_000);

test("commands and runs are listed, and limits hold", async () => {
  const client = new SandboxClient();
  const sid = await client.createSession({ runtimeClass, pids: 61, openFiles: 200, inodes: 5000 });
  const started = await client.start(sid, ["/usr/bin/sleep", "1005"]);
  expect((await client.ps(sid)).map((process) => process.command)).toEqual(["/usr/bin/sleep"]);
  await client.kill(started.runId);
  expect(await client.ps(sid)).toEqual([]);
  const result = await client.exec(sid, "ulimit -n; df --output=itotal /workspace | tail -1");
  expect(result.stdout.split("\n")[0]).toBe("200");
  expect((await client.log(sid)).map((run) => [run.runId, run.status])).toEqual([
    [started.runId, "killed"],
    [result.runId, "completed"],
  ]);
  await client.destroySession(sid);
  await client.close();
}, 120_000);

test("the list of hosts is changed, and what is refused is explained", async () => {
  const client = new SandboxClient();
  const sid = await client.createSession({ runtimeClass, allowedHosts: [] });
  expect((await client.getSession(sid)).allowedHosts).toEqual([]);
  const result = await client.exec(sid, "getent hosts refused.example || true");
  expect(result.denied.map((refusal) => refusal.host)).toEqual(["refused.example"]);
  expect(result.denied[0]?.hint).not.toBe("");
  expect(await client.updateAllowedHosts(sid, { add: ["EXAMPLE.com."] })).toEqual(["example.com"]);
  await client.destroySession(sid);
  await client.close();
}, 120_000);

test("a command in a sandbox of its own", async () => {
  const { stdout } = await sandboxRun("echo hello");
  expect(stdout).toBe("hello\n");
}, 120_000);

test("input stays open, is written in pieces, and ends", async () => {
  const client = new SandboxClient();
  const sid = await client.createSession({ runtimeClass });
  const run = await client.execInteractive(sid, "while read line; do echo got $line; done; exit 5");
  expect(run.runId).toMatch(/^run-/);
  const output = run[Symbol.asyncIterator]();
  for (const word of ["one", "two"]) {
    await run.write(`${word}\n`);
    expect(`${(await output.next()).value}`).toBe(`got ${word}\n`);
  }
  run.closeStdin();
  expect((await output.next()).done).toBe(true);
  expect(run.result.exitCode).toBe(5);
  await expect(run.write("three")).rejects.toThrow(InvalidArgument);
  // More than anything on the way holds; and a command that ends before it has read it.
  const large = await client.execInteractive(sid, "wc -c");
  await large.write(new Uint8Array(5 << 20));
  large.closeStdin();
  for await (const chunk of large) {
    expect(`${chunk}`.trim()).toBe(`${5 << 20}`);
  }
  const short = await client.execInteractive(sid, "exec 0<&-; exit 3");
  const written = short.write(new Uint8Array(16 << 20));
  for await (const chunk of short) {
    expect.fail(`${chunk}`);
  }
  await written;
  expect(short.result.exitCode).toBe(3);
  await expect(client.execInteractive("none", "cat")).rejects.toThrow(NotFound);
  const left = await client.execInteractive(sid, "exec sleep 1000");
  left.close();
  let seen = "";
  do {
    seen = (await client.exec(sid, "pgrep -x sleep || echo none")).stdout;
  } while (seen !== "none\n");
  await client.destroySession(sid);
  await client.close();
}, 120_000);

test("a command has the user that is named, and a program of any length", async () => {
  const client = new SandboxClient();
  const sid = await client.createSession({ runtimeClass });
  expect((await client.exec(sid, "id -un", 30, { user: "root" })).stdout).toBe("root\n");
  await expect(client.exec(sid, "true", 30, { user: "no_such_user" })).rejects.toMatchObject({ code: "user_not_found" });
  const program = `print(__name__) # ${"x".repeat(2 << 20)}`;
  expect((await client.exec(sid, program, 30, { language: "python" })).stdout).toBe("__main__\n");
  await client.exec(sid, "echo kept > file; chmod 400 file");
  await expect(client.writeFile(sid, "file", "x")).rejects.toMatchObject({ code: "permission_denied" });
  await client.destroySession(sid);
  await client.close();
}, 120_000);
