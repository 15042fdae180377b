"""One tenant attacks a real instance, and what the others notice of it is measured."""
