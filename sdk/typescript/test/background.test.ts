/** Background runs through the handle that `start` returns: live output, the end, and an end before that. */
import { expect, test } from "vitest";

import { DeadlineExceeded, NotFound, SandboxClient } from "../src/index.js";

const runtimeClass = process.env["K8E_TEST_RUNTIME"] ?? "";

test("a background run is followed, waited for, found again and killed", async () => {
  const client = new SandboxClient();
  const sid = await client.createSession({ runtimeClass });
  const code = "echo one; until [ -e go ]; do sleep 0.02; done; echo two >&2; printf '\\342\\202'; exit 7";
  const run = await client.start(sid, code);
  expect([run.status, run.exitCode, run.sessionId]).toEqual(["running", null, sid]);
  const seen: string[][] = [];
  for await (const chunk of run) {
    seen.push([chunk.stream, chunk.text]);
    if (seen.length === 1) {
      expect(run.status).toBe("running");
      await client.writeFile(sid, "go", "");
    }
  }
  expect(seen.filter(([, text]) => text).sort()).toEqual([
    ["stderr", "two\n"],
    ["stdout", "one\n"],
    ["stdout", "\ufffd"],
  ]);
  expect([run.status, run.exitCode, run.lost]).toEqual(["completed", 7, 0]);
  expect(await run.wait()).toMatchObject({ exitCode: 7, stderr: "two\n" });

  const long = await client.start(sid, "echo begun; exec sleep 1007");
  await expect(long.wait(0)).rejects.toThrow(DeadlineExceeded);
  const again = await client.attach(long.runId);
  for await (const chunk of again) {
    expect(chunk.text).toBe("begun\n");
    break;
  }
  expect(await again.kill()).toMatchObject({ status: "killed", stdout: "begun\n" });
  expect(await long.wait()).toMatchObject({ status: "killed" });
  await expect(client.attach("no-such-run")).rejects.toThrow(NotFound);
  await client.destroySession(sid);
  await client.close();
}, 120_000);
