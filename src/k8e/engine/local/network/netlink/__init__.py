"""The kernel's own formats: messages, interfaces and routes, elements of nftables, tracked connections."""
