"""Memory: freed tensors stay with the process, for the next step's tensors of the same sizes."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_MMAP_FROM = 2**25  # the most that glibc takes
_TRIM_FROM = 2**30


def keep_freed_memory() -> None:
    """Ask glibc not to return blocks below 32 MiB to the system; elsewhere do nothing.

    By default every large tensor is a new mapping, whose pages the system clears one fault at a
    time: that was half of the time of small networks. For processes of our own only.
    """
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM)
        library.mallopt(_M_TRIM_THRESHOLD, _TRIM_FROM)
    except (AttributeError, OSError, TypeError):
        return
