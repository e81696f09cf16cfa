/**
 * Files of this machine that are copied into a sandbox or come out of one. Names from a sandbox are not trusted: nothing is
 * written outside of the folder that the caller named, and no link in it is followed.
 */
import { randomBytes } from "node:crypto";
import { constants } from "node:fs";
import { type FileHandle, lstat, mkdir, open, readdir, rename, rm, stat } from "node:fs/promises";
import { basename, dirname, join } from "node:path";

import { Failed, InvalidArgument } from "./errors.js";

/** The bytes of one message. */
export const PIECE = 1 << 20;

/** A folder that is to be copied. */
export interface FoundFolder {
  files: { path: string; name: Uint8Array }[];
  /** Folders below it that have no files or folders. */
  bare: Uint8Array[];
  /** Links and special files. */
  skipped: string[];
}

/** Links are not followed: they may lead anywhere, also to secrets. Names may have any bytes. */
export async function listFolder(top: string): Promise<FoundFolder> {
  const found: FoundFolder = { files: [], bare: [], skipped: [] };
  const waiting: [string, Buffer][] = [[top, Buffer.alloc(0)]];
  for (let next = waiting.pop(); next; next = waiting.pop()) {
    const [folder, prefix] = next;
    const entries = await readdir(folder, { withFileTypes: true });
    if (prefix.length && !entries.some((entry) => entry.isDirectory() || entry.isFile())) {
      found.bare.push(prefix.subarray(0, -1));
    }
    for (const entry of entries.sort((one, other) => (one.name < other.name ? -1 : 1))) {
      const path = join(folder, entry.name);
      const name = Buffer.concat([prefix, Buffer.from(entry.name)]);
      if (entry.isDirectory()) {
        waiting.push([path, Buffer.concat([name, Buffer.from("/")])]);
      } else if (entry.isFile()) {
        found.files.push({ path, name });
      } else {
        found.skipped.push(path);
      }
    }
  }
  return found;
}

/** Reads a regular file piece by piece; anything else could keep the caller waiting for ever. */
export async function* readPieces(path: string): AsyncGenerator<Uint8Array> {
  const file = await open(path, constants.O_RDONLY | constants.O_NONBLOCK);
  try {
    if (!(await file.stat()).isFile()) {
      const parts = { code: "not_a_regular_file", hint: "open it yourself and give its stream" };
      throw new InvalidArgument(`${path} is no file or folder`, parts);
    }
    for (;;) {
      const { bytesRead, buffer } = await file.read(Buffer.allocUnsafeSlow(PIECE), 0, PIECE);
      if (!bytesRead) {
        return;
      }
      yield buffer.subarray(0, bytesRead);
    }
  } finally {
    await file.close();
  }
}

/** The permissions of a file of this machine. */
export async function findPermissions(path: string): Promise<number> {
  return (await stat(path)).mode & 0o777;
}

/** Writes a file that has its name when it is complete; folders above it are made. Returns its size. */
export async function replaceFile(path: string, pieces: AsyncIterable<Uint8Array>, executable: boolean): Promise<number> {
  const folder = dirname(path);
  await mkdir(folder, { recursive: true });
  return replaceIn(folder, basename(path), pieces, executable);
}

/** A folder of this machine that is filled from a sandbox. */
export class TargetFolder {
  readonly #path: string;
  readonly #checked = new Set<string>();

  private constructor(path: string) {
    this.#path = path;
  }

  static async open(path: string): Promise<TargetFolder> {
    await mkdir(path, { recursive: true });
    return new TargetFolder(path);
  }

  /** Makes a folder below, with those above it. */
  async make(name: Uint8Array): Promise<void> {
    await this.#enter(split(name));
  }

  /** Writes a file below, and returns its size. */
  async replace(name: Uint8Array, pieces: AsyncIterable<Uint8Array>, executable: boolean): Promise<number> {
    const names = split(name);
    return replaceIn(await this.#enter(names.slice(0, -1)), names.at(-1)!, pieces, executable);
  }

  /** Node has no way to open a name relative to a folder: each is looked at once, and what is made here is no link. */
  async #enter(names: string[]): Promise<string> {
    let path = this.#path;
    for (const name of names) {
      path = join(path, name);
      if (this.#checked.has(path)) {
        continue;
      }
      await mkdir(path).catch(async (error: NodeJS.ErrnoException) => {
        if (error.code !== "EEXIST" || !(await lstat(path)).isDirectory()) {
          throw error;
        }
      });
      this.#checked.add(path);
    }
    return path;
  }
}

function split(name: Uint8Array): string[] {
  const names = Buffer.from(name).toString("utf8").split("/");
  // Node's paths are text: a name of other bytes would become another one.
  if (names.some((part) => ["", ".", ".."].includes(part) || part.includes("\0")) || Buffer.compare(Buffer.from(names.join("/")), name)) {
    throw unsafe(name);
  }
  return names;
}

function unsafe(name: Uint8Array): Failed {
  const hint = "the sandbox lists what cannot be below this folder: do not trust what it says";
  return new Failed(`${JSON.stringify(Buffer.from(name).toString())} is no name of a file below the folder`, { code: "unsafe_name", hint });
}

async function replaceIn(folder: string, name: string, pieces: AsyncIterable<Uint8Array>, executable: boolean): Promise<number> {
  const temporary = join(folder, `.k8e-${randomBytes(8).toString("hex")}`);
  // Whether it is a program is all that is taken over: the rest is for this machine's umask to say.
  const flags = constants.O_WRONLY | constants.O_CREAT | constants.O_EXCL | constants.O_NOFOLLOW;
  const file = await open(temporary, flags, executable ? 0o777 : 0o666);
  try {
    let size: number;
    try {
      size = await writePieces(file, pieces);
    } finally {
      await file.close();
    }
    await rename(temporary, join(folder, name));
    return size;
  } catch (error) {
    await rm(temporary, { force: true });
    throw error;
  }
}

async function writePieces(file: FileHandle, pieces: AsyncIterable<Uint8Array>): Promise<number> {
  let size = 0;
  for await (const piece of pieces) {
    await file.writeFile(piece);
    size += piece.length;
  }
  return size;
}
