"""Virtual machines: the guest that they boot, the VMM around it, and how the engine starts both."""
