"""Lines of JSON that the harness reads."""

import json

MIB = 1 << 20


def say(**fields):
    # One write: processes print to the same pipe.
    print(json.dumps(fields) + "\n", end="", flush=True)


def fill(take, out_of_memory, piece):
    """Takes pieces of memory until it is refused; returns what was taken and the error's name."""
    held = []
    while True:
        try:
            held.append(take(piece))
        except out_of_memory as error:
            return held, type(error).__name__
