"""KV of whole blocks out of vLLM's pool and into it, through a KV connector of our own."""
