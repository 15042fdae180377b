"""Copy whole blocks of KV out of vLLM's pool and into it, through this project's KV connector."""
