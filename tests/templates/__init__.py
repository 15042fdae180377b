"""A laboratory of real chat templates: `make test-templates` downloads them into a cache outside the tree."""
