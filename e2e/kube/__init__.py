"""A real control plane on loopback, and nodes whose kubelets are the process runtime."""
