import { sandboxRun } from "./sandbox_client";
const { stdout } = await sandboxRun("echo hello");
