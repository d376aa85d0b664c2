"""The embedded torch engine: Llama-family models on CPU with paged KV, prefix caching and continuous batching."""
