"""A cluster in discrete events on a virtual clock: real routing and cache index code, a cost model for the rest."""
