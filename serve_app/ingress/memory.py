"""Memory of large bodies goes back to the system, and is not kept for the next one."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
"""Source: glibc's malloc.h. Setting it also keeps malloc from raising it to the largest buffer that was ever freed."""


def return_large_buffers() -> bool:
    """Have malloc map buffers over ``LARGE_BYTES`` on their own, in this process; False where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
