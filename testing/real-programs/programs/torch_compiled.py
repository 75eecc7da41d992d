"""PyTorch's compilers: a kernel of Triton, a function of Inductor, a transform of cuFFT."""

import torch
import triton
import triton.language as tl
from report import MIB, fill, say


@triton.jit
def add_one(values, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + at, tl.load(values + at, mask=at < count) + 1, mask=at < count)


def succeeds(operator):
    try:
        operator()
        torch.cuda.synchronize()
        return True
    except torch.OutOfMemoryError:
        return False


x = torch.ones(1 << 20, device="cuda")
compiled = torch.compile(lambda a: torch.sin(a) * 2 + 1)
late = [
    lambda: add_one[(1 << 12,)](x, 1 << 20, BLOCK=256),
    lambda: compiled(x),
    lambda: torch.fft.fft(x.to(torch.complex64)),
]
held, error = fill(
    lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"),
    torch.OutOfMemoryError,
    32 * MIB,
)
# How many succeed depends on what Inductor has in its cache.
say(oom=error, late=len([succeeds(operator) for operator in late]))
held.clear()
torch.cuda.empty_cache()
say(after=[succeeds(operator) for operator in late])
