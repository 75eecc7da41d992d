"""The CUDA runtime itself: devices, memory, a limit that is reached, memory that is given back."""

import ctypes
import glob
import os
import sys

from report import MIB, say

found = glob.glob(os.path.join(sys.prefix, "lib/python*/site-packages/nvidia/**/" + sys.argv[1]), recursive=True)
runtime = ctypes.CDLL(found[0])
size, pointer = ctypes.c_size_t, ctypes.c_void_p


def call(name, *arguments):
    return getattr(runtime, name)(*arguments)


def info():
    free, total = size(), size()
    result = call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return {"result": result, "free": free.value, "total": total.value}


def take(piece):
    taken = pointer()
    result = call("cudaMalloc", ctypes.byref(taken), size(piece))
    return result, taken


count = ctypes.c_int()
say(devices=call("cudaGetDeviceCount", ctypes.byref(count)), count=count.value)
say(begin=info())
held = []
while True:
    result, taken = take(64 * MIB)
    if result:
        break
    held.append(taken)
say(refused=result, held=len(held) * 64 * MIB, last=call("cudaGetLastError"))
say(freed=[call("cudaFree", taken) for taken in held] == [0] * len(held))
say(end=info())
stream, async_memory = pointer(), pointer()
results = [
    call("cudaStreamCreate", ctypes.byref(stream)),
    call("cudaMallocAsync", ctypes.byref(async_memory), size(MIB), stream),
    call("cudaFreeAsync", async_memory, stream),
    call("cudaStreamSynchronize", stream),
    call("cudaDeviceSynchronize"),
]
say(stream=results)
