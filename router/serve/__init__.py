"""The router's side of Ray Serve: the only room of ``router`` that imports ray."""
