"""nvidia-ml-py and nvitop in a process that holds memory: totals, processes."""

import ctypes
import os

import pynvml
from nvitop import Device
from report import MIB, say

driver = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
results = [
    driver.cuInit(0),
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
    driver.cuCtxSetCurrent(context),
    driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(256 * MIB)),
]
say(results=results)
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
say(count=pynvml.nvmlDeviceGetCount() > 0, total=memory.total, used=memory.used)
processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
say(processes=len(processes), own=os.getpid() in [process.pid for process in processes])
device = Device.all()[0]
say(nvitop=device.memory_total(), name=device.name())
pynvml.nvmlShutdown()
