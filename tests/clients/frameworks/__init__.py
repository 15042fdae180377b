"""One program for each client package. Its first lines say what it needs; it imports nothing else of ours.

Each gets a server's URL and a model, lets the package run the errand of `errand.py` with its tools, asks for one
structured answer, and prints both as JSON. The errand is at a temperature of 0, since the model is small.
"""
