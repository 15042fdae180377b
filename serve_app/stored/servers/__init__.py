"""Database servers, chosen by the scheme of their URL. Each file here is one, with its ``SERVER``."""
