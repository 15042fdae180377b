"""How a replica joins and leaves a deployment without losing what it has cached. Knows no HTTP."""
