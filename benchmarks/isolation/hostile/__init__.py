"""A hostile client beside a neighbour."""
