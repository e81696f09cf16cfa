"""The channel to agents in pods: TCP under Noise_KX_25519_ChaChaPoly_BLAKE2s (docs/kubernetes-channel.md)."""

from k8e.link.noise.dial import AGENT_PORT, PodDialer, pod_arguments
from k8e.link.noise.keys import GatewayKey

__all__ = ["AGENT_PORT", "GatewayKey", "PodDialer", "pod_arguments"]
