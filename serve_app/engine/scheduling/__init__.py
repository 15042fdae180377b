"""Choose the sequences of each step, their tokens and blocks. Knows no tensors, threads or clients."""
