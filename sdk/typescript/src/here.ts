import { dirname } from "node:path";
import { fileURLToPath } from "node:url";

/** The folder of this module. The one thing that `import` and `require` spell differently: scripts/build.mjs has the other. */
export function here(): string {
  return dirname(fileURLToPath(import.meta.url));
}
