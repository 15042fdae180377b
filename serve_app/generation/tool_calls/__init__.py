"""Read tool calls from a model's streamed text, in the format that the model was trained on."""
