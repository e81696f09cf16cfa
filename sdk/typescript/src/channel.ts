/** What a connection to a gateway is made of. */
import { type ChannelCredentials, type ChannelOptions, credentials } from "@grpc/grpc-js";

const MESSAGE = 65 << 20;

export const OPTIONS: ChannelOptions = {
  "grpc.max_receive_message_length": MESSAGE,
  "grpc.max_send_message_length": MESSAGE,
  "grpc.enable_retries": 0, // a command is run once
  "grpc.use_local_subchannel_pool": 1, // the next daemon is not made to wait for the failures of the last
  // A gateway that hangs is noticed, however long a command is silent.
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 20_000,
};

export interface Target {
  address: string;
  /** From then on it should be looked for anew. */
  renewAt: number;
  /** The daemon of this machine: it is started when it does not run. */
  local: boolean;
  /** Its process, if it can be seen from here. */
  daemon: string;
  options: ChannelOptions;
  credentials(): ChannelCredentials;
}

/** `authority` is the CAs that its certificate may come from; null: those of the system. */
export function makeTarget(
  address: string,
  authority: Buffer | null,
  key: Buffer,
  certificate: Buffer,
  renewAt = Infinity,
  local = false,
  daemon = "",
): Target {
  // Node warns about addresses as names in a handshake; every gateway is also localhost for clients on its machine.
  const options = address.startsWith("127.0.0.1:") ? { "grpc.ssl_target_name_override": "localhost" } : {};
  return { address, renewAt, local, daemon, options, credentials: () => credentials.createSsl(authority, key, certificate) };
}
