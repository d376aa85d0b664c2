"""Load and latency of a fleet's tiers: scraped from workers and routers, or asked from Prometheus."""
