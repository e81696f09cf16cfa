import { type ChannelCredentials, type ChannelOptions } from "@grpc/grpc-js";
export interface Wanted { endpoint: string | undefined; apiKey: string | undefined; profile: string | undefined }
export interface Target { address: string; renewAt: number; options: ChannelOptions; credentials(): ChannelCredentials }
export const OPTIONS: ChannelOptions = {};
export async function findTarget(_wanted: Wanted): Promise<Target> { throw new Error("x"); }
