"""The HTTP routes, one file for each API. They use one address and nothing below it."""
