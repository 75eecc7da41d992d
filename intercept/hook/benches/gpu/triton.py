"""Compiles a kernel of Triton's for this GPU, and compares its sums with PyTorch's. One line of JSON."""
import json

import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


COUNT, BLOCK = 1_000_003, 1024
x, y = (torch.randn(COUNT, device="cuda") for _ in range(2))
out = torch.empty_like(x)
add[(triton.cdiv(COUNT, BLOCK),)](x, y, out, COUNT, BLOCK=BLOCK)
torch.cuda.synchronize()
print(json.dumps({"right": int((out == x + y).sum()), "of": COUNT}))
