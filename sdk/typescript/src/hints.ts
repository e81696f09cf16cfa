/**
 * What to do next, in the words of this library. The gateway's own hints name commands of `k8e`, which is the right answer
 * for a person at a terminal; here the code of an error decides, and the gateway's hint stands for all others.
 */

const KEY = "Give SandboxClient an apiKey that is valid, or a profile.";

/** By the code of the error. */
export const HINTS: Readonly<Record<string, string>> = {
  approval_not_found: "listApprovals() lists those that can be answered.",
  bad_apikey: "Copy the whole key: it begins with k8e_ and has 106 characters.",
  bad_endpoint: "Write HOST:PORT, such as 10.0.0.1:50051; it is always TLS.",
  beyond_ceiling: "Leave the host out, or have the administrator of the gateway's machine allow it.",
  beyond_parent: "Leave it out, or open it for the parent first: updateAllowedHosts(parent, { add: [...] }).",
  certificate_expired: KEY,
  certificate_unreadable: "K8E_SANDBOX_CERT and K8E_SANDBOX_KEY name files in PEM that this process can read.",
  connection_lost: "It may have been done: look (getSession, listFiles, listSessions) before you call it again.",
  credential_incomplete: "Set K8E_SANDBOX_CERT too: of a KEY the certificate, of a TOKEN_FILE the gateway's CA.",
  daemon_not_allowed: "Run as a member of the group k8e, or give SandboxClient an endpoint and an apiKey.",
  daemon_not_running: "Root starts it; or give SandboxClient an endpoint and an apiKey.",
  daemon_not_started: "Is k8e installed here? Else give SandboxClient an endpoint and an apiKey.",
  daemon_unreachable: "Call again; if it stays silent, the administrator of this machine restarts the daemon.",
  deadline_exceeded: "Give it a longer timeout; start() runs a command in the background, poll() has its result.",
  git_failed: "Are the address and the ref right, and may the session reach the host? allowedHosts opens it.",
  image_not_found: "listImages() lists the images there are; an administrator of the gateway's machine adds more.",
  key_expired: KEY,
  key_refused: KEY,
  key_revoked: KEY,
  no_runtime: "An administrator of the gateway's machine has to make a runtime work there.",
  no_such_profile: "Connection profiles are in ~/.k8e/sandbox/profiles.yaml; or give an endpoint and an apiKey.",
  not_logged_in: KEY,
  not_started: "The daemon's log on the gateway's machine has the cause.",
  profile_unusable: "Only its user may be able to read the file (mode 0600); or give an endpoint and an apiKey.",
  run_lost: "The command may have run, and may still: log(sessionId) lists the runs of its session.",
  runtime_unavailable: "status() names the runtime that works; the runtimeClass '' takes the strongest there is.",
  same_user: "Another caller answers: a client whose apiKey has the scope operator or admin.",
  sandbox_failed: "The daemon's log on the gateway's machine has the cause.",
  secrets_missing: "Give all of them again: startSession(sessionId, { secrets: {...} }).",
  self_approval: "Another caller answers: a client whose apiKey has the scope operator or admin.",
  server_not_trusted: "The address answers with another certificate than the one this client trusts: check both.",
  session_ambiguous: "Say whose you mean: new SandboxClient({ tenantId: NAME, onlyTenant: true }).",
  session_not_persistent: "Destroy it, or make another: createSession({ persistent: true }).",
  session_stopped: "Its files are kept. Start it: startSession(sessionId).",
  target_ambiguous: "Give one of them.",
  token_unreadable: "It names a file with a service account's token that this process can read.",
  unreachable: "Is the address right, does the gateway run there, and does it listen to other machines?",
  variables_missing: "Give them again: startSession(sessionId, { env: {...} }).",
  wrong_gateway: "The address is wrong, or the connection is intercepted. Nothing was sent.",
};

/** `said`: the gateway's own hint. */
export function findHint(code: string, said = ""): string {
  return HINTS[code] ?? said;
}

/** How a refused host is allowed; `entry` is empty where no list allows it, and `said` tells why. */
export function hintAtHosts(sessionId: string, entry: string, said: string): string {
  if (!entry) {
    return said;
  }
  return sessionId
    ? `Allow it: updateAllowedHosts("${sessionId}", { add: ["${entry}"] }).`
    : `Allow it when the session is made: createSession({ allowedHosts: ["${entry}"] }).`;
}
