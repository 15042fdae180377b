"""How a request's tokens are chosen inside vLLM: by this project's own code, in the place of its sampler."""
