"""OpenAI's responses and their stored conversations."""
