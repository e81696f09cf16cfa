"""`k8e doctor`: tries what works on this machine, and fixes what can be fixed."""
