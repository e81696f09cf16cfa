// Compiles the package twice, for `import` and for `require`, and puts the contract beside it.
import { execFileSync } from "node:child_process";
import { cpSync, mkdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const root = join(dirname(fileURLToPath(import.meta.url)), "..");
const tsc = join(root, "node_modules", "typescript", "bin", "tsc");

rmSync(join(root, "dist"), { recursive: true, force: true });
mkdirSync(join(root, "proto"), { recursive: true });
cpSync(join(root, "..", "..", "proto", "sandbox", "v1", "sandbox.proto"), join(root, "proto", "sandbox.proto"));
execFileSync(process.execPath, [tsc, "--project", root], { stdio: "inherit" });
// TypeScript decides by the nearest package.json which of the two a file is: a copy of the sources that says CommonJS.
const draft = join(root, "build", "cjs");
rmSync(draft, { recursive: true, force: true });
cpSync(join(root, "src"), join(draft, "src"), { recursive: true });
writeFileSync(join(draft, "src", "here.ts"), "export function here(): string {\n  return __dirname;\n}\n");
writeFileSync(join(draft, "package.json"), '{"type": "commonjs"}\n');
writeFileSync(
  join(draft, "tsconfig.json"),
  JSON.stringify({ extends: "../../tsconfig.json", compilerOptions: { outDir: "../../dist/cjs", rootDir: "src" }, include: ["src"] }),
);
execFileSync(process.execPath, [tsc, "--project", draft], { stdio: "inherit" });
writeFileSync(join(root, "dist", "cjs", "package.json"), '{"type": "commonjs"}\n');
