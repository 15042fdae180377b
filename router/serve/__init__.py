"""The router's side of Ray Serve, the only package of ``router`` that imports ray."""
