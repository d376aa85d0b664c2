"""What the operator says about itself: /healthz, /readyz, /metrics and its log lines."""
