"""fill: takes memory until it is refused; products: multiplies matrices for three seconds. One line of JSON."""
import json
import sys
import time

import torch


def fill():
    held = []
    try:
        while True:
            held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        pass
    return {"reserved": torch.cuda.memory_reserved(), "total": torch.cuda.mem_get_info()[1]}


def products():
    a, b = (torch.randn(4096, 4096, dtype=torch.float16, device="cuda") for _ in range(2))
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    count, end = 0, time.monotonic() + 3
    while time.monotonic() < end:
        for _ in range(20):
            a @ b
        torch.cuda.synchronize()
        count += 20
    return {"products": count}


print(json.dumps({"fill": fill, "products": products}[sys.argv[1]]()))
