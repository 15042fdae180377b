"""What an ingress' process does not keep in memory: buffers of large bodies, and torch.

Both change the whole process, so that only the ingress deployment calls them.
"""

from __future__ import annotations

import ctypes
import sys

LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
"""Source: glibc's malloc.h. Setting it also keeps malloc from raising it to the largest buffer that was ever freed."""


def return_large_buffers() -> bool:
    """Have malloc map buffers over ``LARGE_BYTES`` on their own, in this process; False where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))


def do_without_torch() -> None:
    """Have transformers see no torch in this process, unless it is there already.

    An ingress takes only a tokenizer from transformers, which otherwise loads torch for it: 200 MB and seconds.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python's own way to say "not to be found"
