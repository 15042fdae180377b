"""How a replica joins and leaves a deployment without losing its cache. Knows no HTTP."""
