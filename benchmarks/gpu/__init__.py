"""What warmpath brings on one GPU, beside plain vLLM on the same card."""
