"""Tool calls read from a model's text while it comes, by the format that the model was trained on."""
