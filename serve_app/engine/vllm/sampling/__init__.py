"""Choose a request's tokens inside vLLM with this project's own code, in place of vLLM's sampler."""
