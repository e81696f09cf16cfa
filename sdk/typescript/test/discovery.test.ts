/** How an endpoint may be written: the list that the command line and Python are tested with, too. */
import { readFileSync } from "node:fs";

import { expect, test } from "vitest";

import { readAddress } from "../src/discovery.js";
import { InvalidArgument } from "../src/index.js";

interface Vector {
  text: string;
  address?: string;
  code?: string;
}

const { addresses } = JSON.parse(readFileSync(new URL("../../discovery.json", import.meta.url), "utf8")) as { addresses: Vector[] };

test.each(addresses)("an address: $text", ({ text, address, code }) => {
  if (address) {
    expect(readAddress(text)).toBe(address);
    return;
  }
  try {
    readAddress(text);
    expect.unreachable();
  } catch (error) {
    expect(error).toBeInstanceOf(InvalidArgument);
    expect((error as InvalidArgument).code).toBe(code);
  }
});
