"""A discrete-event simulation of a cluster: real code for routing and the cache index, a cost model for the rest."""
