"""Plans → Kubernetes manifests. Pure: the same plan gives the same bytes."""
