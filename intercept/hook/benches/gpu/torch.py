"""context: makes a context; fill: takes memory until it is refused; both wait then, with what they see. products: multiplies matrices
for three seconds. One line of JSON."""
import ctypes
import json
import shutil
import signal
import subprocess
import sys
import time

import torch

MIB = 1 << 20


def multiply(count):
    a, b = (torch.randn(4096, 4096, dtype=torch.float16, device="cuda") for _ in range(2))
    for _ in range(count):
        a @ b
    torch.cuda.synchronize()


def used_by_nvml(uuid):
    class Memory(ctypes.Structure):
        _fields_ = [(field, ctypes.c_ulonglong) for field in ("total", "free", "used")]

    nvml, device, memory = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), Memory()
    assert nvml.nvmlInit_v2() == 0
    assert nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    return memory.used


def used_by_smi(uuid):
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=" + uuid]
    return subprocess.run(query, capture_output=True, text=True).stdout


def seen(uuid):
    free, total = torch.cuda.mem_get_info()
    return {"reserved": torch.cuda.memory_reserved(), "total": total, "torchUsed": total - free,
            "nvmlUsed": used_by_nvml(uuid), "smi": used_by_smi(uuid)}


def context(uuid):
    multiply(1)
    return seen(uuid)


def fill(uuid):
    multiply(1)
    held, piece = [], 256 * MIB
    # Tensors of less than 10 MiB share pieces of 20 MiB.
    while piece >= 16 * MIB:
        try:
            held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            piece //= 2
    return seen(uuid)


def products():
    multiply(20)
    a, b = (torch.randn(4096, 4096, dtype=torch.float16, device="cuda") for _ in range(2))
    count, end = 0, time.monotonic() + 3
    while time.monotonic() < end:
        for _ in range(20):
            a @ b
        torch.cuda.synchronize()
        count += 20
    return {"products": count}


what = sys.argv[1]
print(json.dumps({"context": context, "fill": fill, "products": products}[what](*sys.argv[2:])), flush=True)
if what != "products":
    signal.pause()
