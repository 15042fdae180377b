"""Who runs, with how many tokens, over which blocks. Knows no tensors, threads or clients."""
