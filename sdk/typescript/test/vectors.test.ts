/** The list that drives both SDKs, against a real gateway (tests/sdk/test_typescript.py starts it). */
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { afterAll, beforeAll, describe, expect, test } from "vitest";

import * as sdk from "../src/index.js";

const vectors = JSON.parse(readFileSync(join(import.meta.dirname, "..", "..", "vectors.json"), "utf8"));
const runtimeClass = process.env["K8E_TEST_RUNTIME"] ?? "";
const unbase64 = (text: string) => Buffer.from(text, "base64");

const client = new sdk.SandboxClient();
let session = "";

beforeAll(async () => {
  session = await client.createSession({ runtimeClass });
}, 120_000);

afterAll(async () => {
  await client.destroySession(session);
  await client.close();
}, 60_000);

describe("runs", () => {
  for (const vector of vectors.runs) {
    test(vector.name, async () => {
      const result = await client.exec(session, vector.code, vector.timeout ?? 30, {
        language: vector.language,
        ...(vector.stdin ? { stdin: unbase64(vector.stdin) } : {}),
        ...(vector.env ? { env: vector.env } : {}),
        ...(vector.workdir ? { workdir: vector.workdir } : {}),
      });
      expect(result.exitCode).toBe(vector.exit_code);
      expect(result.status).toBe(vector.status);
      if (vector.truncated) {
        expect(result.truncated).toBe(true);
        expect(result.stdoutBytes).toBe(vector.stdout_bytes);
        return;
      }
      expect(Buffer.from(result.rawStdout)).toEqual(unbase64(vector.stdout));
      expect(Buffer.from(result.rawStderr)).toEqual(unbase64(vector.stderr));
      expect(result.stdoutBytes).toBe(unbase64(vector.stdout).length);
      expect(Buffer.from(result.stdout, "utf8").includes("\ufffd")).toBe(unbase64(vector.stdout).toString().includes("\ufffd"));
      expect(result.sessionId).toBe(session);
    }, 60_000);
  }
});

describe("live runs", () => {
  for (const vector of vectors.runs.filter((each: { timeout?: number }) => !each.timeout)) {
    test(vector.name, async () => {
      const pieces: Record<sdk.StreamName, Uint8Array[]> = { stdout: [], stderr: [] };
      const stream = client.execStream(session, vector.code, 30, {
        language: vector.language,
        ...(vector.stdin ? { stdin: unbase64(vector.stdin) } : {}),
        ...(vector.env ? { env: vector.env } : {}),
        ...(vector.workdir ? { workdir: vector.workdir } : {}),
      });
      for await (const chunk of stream) {
        pieces[chunk.stream].push(chunk);
      }
      expect(stream.result.exitCode).toBe(vector.exit_code);
      const stdout = Buffer.concat(pieces.stdout);
      expect(stdout.length).toBe(vector.stdout_bytes ?? unbase64(vector.stdout).length);
      if (!vector.truncated) {
        expect(stdout).toEqual(unbase64(vector.stdout));
        expect(Buffer.concat(pieces.stderr)).toEqual(unbase64(vector.stderr));
      }
    }, 60_000);
  }
});

describe("files", () => {
  for (const vector of vectors.files) {
    test(vector.name, async () => {
      const piece = unbase64(vector.content);
      const content = Buffer.concat(Array.from({ length: vector.repeat ?? 1 }, () => piece));
      expect(await client.writeFile(session, vector.path, content)).toBe(content.length);
      expect(Buffer.from(await client.readBytes(session, vector.path)).equals(content)).toBe(true);
      if (vector.text !== undefined) {
        expect(await client.readFile(session, vector.path)).toBe(vector.text);
        expect(await client.writeFile(session, vector.path, vector.text, "a")).toBe(content.length);
        expect(await client.readFile(session, vector.path)).toBe(vector.text + vector.text);
      }
      const named = (await client.listFiles(session)).filter((file) => file.path.endsWith(vector.path));
      expect(named).toHaveLength(1);
      await client.exec(session, ["/usr/bin/rm", "--", vector.path]);
    }, 120_000);
  }

  test("what is no text", async () => {
    await client.writeFile(session, "/workspace/bytes", Uint8Array.of(0xff));
    await expect(client.readFile(session, "/workspace/bytes")).rejects.toThrow(sdk.NotText);
  });
});

describe("approvals", () => {
  // Another caller than the one that asks.
  const boss = new sdk.SandboxClient({
    endpoint: process.env["K8E_TEST_ENDPOINT"] ?? "",
    apiKey: process.env["K8E_TEST_ADMIN_KEY"] ?? "",
  });
  afterAll(() => boss.close());

  for (const vector of vectors.approvals) {
    test(vector.name, async () => {
      const asked = await client.confirmAction(session, vector.action, 0, { expiresIn: vector.expires_in ?? 0 });
      expect(asked).toMatchObject({ status: "pending", approved: false, action: vector.shown, sessionId: session });
      const answered = "answer" in vector;
      if (answered) {
        expect(await client.listApprovals()).toContainEqual(asked);
        await expect(client.approveAction(asked.approvalId)).rejects.toThrow(sdk.PermissionDenied);
        await boss.approveAction(asked.approvalId, vector.answer, { reason: vector.reason });
        await expect(boss.approveAction(asked.approvalId, !vector.answer)).rejects.toThrow(sdk.Conflict);
      }
      const settled = await client.awaitApproval(asked.approvalId, 20);
      const approved = vector.status === "approved";
      expect(settled).toMatchObject({ status: vector.status, approved, action: vector.shown, reason: vector.reason ?? "" });
      expect([settled.answeredBy !== "", settled.answeredAt !== 0]).toEqual([answered, answered]);
      expect((await client.listApprovals()).map((one) => one.approvalId)).not.toContain(settled.approvalId);
      expect(await client.listApprovals({ allStates: true })).toContainEqual(settled);
    }, 60_000);
  }
});

const childOptions = (vector: Record<string, any>): sdk.SubAgentOptions => ({
  ...(vector["agent_type"] ? { agentType: vector["agent_type"] } : {}),
  ...(vector["workspace_path"] ? { workspacePath: vector["workspace_path"] } : {}),
  ...(vector["allowed_hosts"] ? { allowedHosts: vector["allowed_hosts"] } : {}),
  ...(vector["memory"] ? { memory: vector["memory"] } : {}),
  ...(vector["cpus"] ? { cpus: vector["cpus"] } : {}),
  ...(vector["env"] ? { env: vector["env"] } : {}),
  ...(vector["read_only"] ? { readOnly: true } : {}),
  ...(vector["powerless"] ? { powerless: true } : {}),
});

describe("children", () => {
  for (const vector of vectors.children) {
    test(vector.name, async () => {
      await client.writeFile(session, "shared", "the parent's\n");
      const child = await client.runSubAgent(session, childOptions(vector));
      expect((await client.getSession(child)).parentSessionId).toBe(session);
      expect((await client.getSession(session)).children).toEqual([child]);
      expect(Buffer.from((await client.exec(child, vector.code)).rawStdout)).toEqual(unbase64(vector.stdout));
      await expect(client.runSubAgent(child)).rejects.toMatchObject({ code: "child_of_child" });
      await client.destroySession(child);
    }, 60_000);
  }
});

describe("lasting", () => {
  for (const vector of vectors.lasting) {
    test(vector.name, async () => {
      const { env, secrets = {}, labels = {} } = vector;
      const made = await client.createSession({ runtimeClass, persistent: true, env, secrets, labels });
      try {
        expect(await client.getSession(made)).toMatchObject({ persistent: true, labels, secretKeys: Object.keys(secrets) });
        expect(Buffer.from((await client.exec(made, vector.before)).rawStdout)).toEqual(unbase64(vector.before_stdout));
        const ended = client.exec(made, "touch begun; sleep 1000", 600);
        await client.exec(made, "until [ -e begun ]; do sleep 0.05; done");
        expect((await client.stopSession(made)).phase).toBe("stopped");
        expect(await ended).toMatchObject({ status: "killed", reason: expect.stringMatching(/./) });
        expect((await client.stopSession(made)).phase).toBe("stopped");
        await expect(client.exec(made, "true")).rejects.toMatchObject({ code: "session_stopped" });
        if (vector.secrets) {
          await expect(client.startSession(made)).rejects.toMatchObject({ code: "secrets_missing", field: "secrets" });
        }
        expect((await client.startSession(made, { env: vector.start_env ?? {}, secrets })).phase).toBe("active");
        expect(Buffer.from((await client.exec(made, vector.after)).rawStdout)).toEqual(unbase64(vector.after_stdout));
      } finally {
        await client.destroySession(made);
      }
    }, 120_000);
  }

  test("images", async () => {
    expect(await client.listImages()).toEqual([]);
  });
});

test("of namesakes, one tenant's are meant", async () => {
  const { session_id: sessionId, tenants, error, code } = vectors.namesakes;
  const access = { endpoint: process.env["K8E_TEST_ENDPOINT"] ?? "", apiKey: process.env["K8E_TEST_ADMIN_KEY"] ?? "" };
  const all = new sdk.SandboxClient(access);
  const each = tenants.map((tenantId: string) => new sdk.SandboxClient({ ...access, tenantId, onlyTenant: true }));
  for (const [index, one] of each.entries()) {
    expect(await one.createSession({ runtimeClass, sessionId })).toBe(sessionId);
    await one.writeFile(sessionId, "who", tenants[index]);
  }
  const failure = await all.getSession(sessionId).catch((caught: unknown) => caught);
  expect(failure).toBeInstanceOf((sdk as unknown as Record<string, new () => Error>)[error]);
  expect(failure).toMatchObject({ code });
  for (const [index, one] of each.entries()) {
    expect((await one.listSessions()).map((session: sdk.SessionInfo) => session.tenantId)).toEqual([tenants[index]]);
    expect(await one.readFile(sessionId, "who")).toBe(tenants[index]);
    expect((await one.exec(sessionId, "cat who")).stdout).toBe(tenants[index]);
    await one.destroySession(sessionId);
    await one.close();
  }
  await all.close();
}, 120_000);

describe("mistakes", () => {
  const call = (vector: Record<string, any>): Promise<unknown> => {
    switch (vector["call"]) {
      case "exec":
        return client.exec(vector["session"] ?? session, vector["argv"] ?? "true", vector["timeout"] ?? 30);
      case "approve":
        return client.approveAction(vector["approval"]);
      case "confirm":
        return client.confirmAction(session, vector["action"], 0);
      case "poll":
        return client.poll(vector["run"]);
      case "read":
        return client.readFile(session, vector["path"]);
      case "stop":
        return client.stopSession(vector["session"] ?? session);
      case "start":
        return client.startSession(vector["session"] ?? session, { env: vector["env"] ?? {} });
      case "subagent":
        return client.runSubAgent(vector["session"] ?? session, childOptions(vector));
      default:
        return client.createSession({
          runtimeClass: vector["runtime"] ?? runtimeClass,
          ...(vector["allowed_hosts"] ? { allowedHosts: vector["allowed_hosts"] } : {}),
          ...(vector["session_id"] ? { sessionId: vector["session_id"] } : {}),
        });
    }
  };
  for (const vector of vectors.errors) {
    test(vector.name, async () => {
      const error = await call(vector).then(
        () => undefined,
        (failure: unknown) => failure,
      );
      expect(error).toBeInstanceOf((sdk as unknown as Record<string, new () => Error>)[vector.error]);
      expect(error).toMatchObject({ code: vector.code, ...(vector.field ? { field: vector.field } : {}) });
      expect((error as sdk.SandboxError).hint).not.toMatch(/\bk8e (sandbox|connect|login|image|doctor|server)|(^|[\s(`])--[a-z]/);
    });
  }
});
