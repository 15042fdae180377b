"""What exists for CPUs only: a leaf that the GPU path never enters."""
