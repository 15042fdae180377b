"""How many replicas there should be: signals, a pure rule over them, and their surroundings in Serve's controller."""
