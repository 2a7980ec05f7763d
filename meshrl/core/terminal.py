"""A terminal that is gone: its window is closed, or its ssh connection is lost. This module does not import torch."""

from __future__ import annotations

import errno
import os
import termios


def drop_lost_terminal() -> None:
    """Connect stdout and stderr to os.devnull if they are a terminal that is gone. Else each later print, and Python's
    last flush, would fail with EIO."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # any other error: not a terminal, or closed
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, descriptor)
                os.close(devnull)
