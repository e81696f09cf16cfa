/** The name by which the first documents of this SDK import it. */
export * from "./src/index.js";
