"""Kernels for CPUs with AMX, built by the compiler that is there, and checked before they are used."""
