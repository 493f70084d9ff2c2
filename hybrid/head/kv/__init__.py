"""KV cache strategies: one protocol (`base.KVCache`), one module a strategy."""
