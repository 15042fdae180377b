"""warmpath's routing inside Ray Serve LLM: a server class and a request router class for an ``LLMConfig``.

Their modules import neither torch nor vLLM: Ray loads them where neither may be.
"""

from serve_app.ray_llm.cache_app import build_cache_app
from serve_app.ray_llm.router import WarmRouter
from serve_app.ray_llm.server import WarmLLMServer

__all__ = ["WarmLLMServer", "WarmRouter", "build_cache_app"]
