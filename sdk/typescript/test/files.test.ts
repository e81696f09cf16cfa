/** Files between this machine and a sandbox: from paths, streams and folders, in parts and in time. */
import { createReadStream, createWriteStream, mkdtempSync, readFileSync, readdirSync, rmSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { mkdir } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { afterAll, beforeAll, expect, test } from "vitest";

import { DeadlineExceeded, Failed, InvalidArgument, NotFound, SandboxClient } from "../src/index.js";
import { TargetFolder } from "../src/local_files.js";

const MIB = 1 << 20;
const client = new SandboxClient();
let session = "";
let here = "";

beforeAll(async () => {
  session = await client.createSession({ runtimeClass: process.env["K8E_TEST_RUNTIME"] ?? "" });
  here = mkdtempSync(join(tmpdir(), "k8e-files-"));
}, 120_000);

afterAll(async () => {
  rmSync(here, { recursive: true });
  await client.destroySession(session);
  await client.close();
}, 60_000);

test("a folder goes in and comes out without its links", async () => {
  const [source, target] = [join(here, "in"), join(here, "out")];
  await mkdir(join(source, "deep", "er"), { recursive: true });
  await mkdir(join(source, "void"));
  writeFileSync(join(source, "a"), "a", { mode: 0o755 });
  writeFileSync(join(source, "deep", "er", "b c"), Buffer.alloc(5 * MIB, "b"));
  symlinkSync("/etc/passwd", join(source, "link"));
  const sent = await client.upload(session, source, "copies");
  expect(sent).toEqual({ bytes: 1 + 5 * MIB, files: 2, skipped: [join(source, "link")] });
  await client.exec(session, "cd copies; [ -x a ] && ln -s /etc/passwd outside");
  const got = await client.download(session, "copies", target);
  expect(got).toEqual({ bytes: 1 + 5 * MIB, files: 2, skipped: ["outside"] });
  expect([statSync(join(target, "a")).mode & 0o100, statSync(join(target, "deep", "er", "b c")).mode & 0o100]).toEqual([0o100, 0]);
  expect(readFileSync(join(target, "deep", "er", "b c")).equals(Buffer.alloc(5 * MIB, "b"))).toBe(true);
  expect(readdirSync(target).sort()).toEqual(["a", "deep", "void"]);
}, 60_000);

test("a file goes in and comes out by path and by stream", async () => {
  const content = Buffer.alloc(20 * MIB + 1, "0123456789abcdefg");
  writeFileSync(join(here, "source"), content);
  expect((await client.upload(session, join(here, "source"), "new/file")).bytes).toBe(content.length);
  expect((await client.download(session, "new/file", join(here, "made", "target"))).bytes).toBe(content.length);
  expect(readFileSync(join(here, "made", "target")).equals(content)).toBe(true);
  const stream = createReadStream(join(here, "source"), { start: MIB });
  expect((await client.upload(session, stream, "rest")).bytes).toBe(content.length - MIB);
  const target = createWriteStream(join(here, "streamed"));
  expect((await client.download(session, "rest", target)).bytes).toBe(content.length - MIB);
  await new Promise((resolve) => target.end(resolve));
  expect(readFileSync(join(here, "streamed")).equals(content.subarray(MIB))).toBe(true);
}, 60_000);

test.each([
  [0, 4, "0123"],
  [4, undefined, "456789"],
  [8, 100, "89"],
  [10, undefined, ""],
  [3, 0, ""],
])("a part of a file: %s, %s", async (offset, length, expected) => {
  await client.writeFile(session, "ten", "0123456789");
  const part = await client.readBytes(session, "ten", { offset, ...(length === undefined ? {} : { length }) });
  expect(Buffer.from(part).toString()).toBe(expected);
  await expect(client.readBytes(session, "nothing", { length: 0 })).rejects.toThrow(NotFound);
});

test("of a source that cannot be read, no part becomes a file", async () => {
  const broken = async function* () {
    yield Buffer.alloc(MIB);
    throw new Error("the disk is gone");
  };
  await expect(client.upload(session, broken(), "part")).rejects.toThrow("the disk is gone");
  await expect(client.readFile(session, "part")).rejects.toThrow(NotFound);
});

test("a refused upload says so, however much is left to send", async () => {
  const endless = async function* () {
    for (;;) {
      yield Buffer.alloc(MIB);
    }
  };
  await expect(client.upload("no-such-session", endless(), "x")).rejects.toThrow(NotFound);
});

test("file calls have deadlines", async () => {
  const timeout = 0;
  await expect(client.readBytes(session, "ten", { timeout })).rejects.toThrow(DeadlineExceeded);
  await expect(client.writeFile(session, "ten", "x", "w", { timeout })).rejects.toThrow(DeadlineExceeded);
  await expect(client.listFiles(session, 0, { timeout })).rejects.toThrow(DeadlineExceeded);
  await expect(client.upload(session, join(here, "source"), "x", { timeout })).rejects.toThrow(DeadlineExceeded);
  await expect(client.download(session, "ten", join(here, "late"), { timeout })).rejects.toThrow(DeadlineExceeded);
  expect(readdirSync(here)).not.toContain("late");
});

test("a path in place of a time is explained", async () => {
  await expect(client.listFiles(session, "/tmp" as unknown as number)).rejects.toThrow(InvalidArgument);
});

test("names of a hostile sandbox do not leave the folder", async () => {
  const folder = await TargetFolder.open(join(here, "closed"));
  const nothing = async function* () {};
  for (const name of ["../out", "a/../../out", "/etc/x", "", ".", "a//b", "x\0y"]) {
    await expect(folder.replace(Buffer.from(name), nothing(), false)).rejects.toThrow(Failed);
    await expect(folder.make(Buffer.from(name))).rejects.toThrow(Failed);
  }
  symlinkSync(here, join(here, "closed", "way"));
  await expect(folder.replace(Buffer.from("way/x"), nothing(), false)).rejects.toThrow();
  expect(readdirSync(join(here, "closed"))).toEqual(["way"]);
});
