"""OpenAI's responses. Nothing is stored, so nothing refers to an earlier one."""
