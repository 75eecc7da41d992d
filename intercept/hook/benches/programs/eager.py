"""PyTorch's eager loop: small operators, in ns for each. Without the interceptor and with it."""

import json
import time

import torch

OPERATORS = 4
ROUNDS = 5_000


def operators(x, y):
    x = x + y
    x = torch.relu(x)
    x = x * y
    return x - y


x, y = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")
best = float("inf")
with torch.no_grad():
    for _ in range(5):
        begin = time.perf_counter_ns()
        for _ in range(ROUNDS):
            operators(x, y)
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter_ns() - begin) / (ROUNDS * OPERATORS))
print(json.dumps({"ns": best}))
