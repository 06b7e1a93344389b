"""Memory that was freed goes back to the system."""

import ctypes
import sys


def give_back() -> None:
    """What malloc keeps of memory that nobody uses any more. After loading or rounding a model's weights in several threads that is half
    a GiB, which would be counted as this process's. Only glibc is to be asked for it; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
