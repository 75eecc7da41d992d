"""CuPy: kernels that NVRTC compiles, both pools at the limit, a graph."""

import cupy
from report import MIB, fill, say

OUT_OF_MEMORY = cupy.cuda.memory.OutOfMemoryError
device = cupy.cuda.Device(0)
say(devices=cupy.cuda.runtime.getDeviceCount())
x = cupy.zeros((512, 512), dtype=cupy.float32)
y = cupy.sin(x) + 1
y.sum()
device.synchronize()
free, total = device.mem_info
say(total=total, used=cupy.get_default_memory_pool().used_bytes())
held, error = fill(lambda size: cupy.empty(size, dtype=cupy.uint8), OUT_OF_MEMORY, 64 * MIB)
say(oom=error, held=len(held) * 64 * MIB)
# An operator that the program meets when its memory is full.
try:
    late = cupy.argsort(x.ravel()[:16])
    say(late="success")
except OUT_OF_MEMORY as error:
    say(late=type(error).__name__)
held.clear()
cupy.get_default_memory_pool().free_all_blocks()
say(after=len(cupy.argsort(x.ravel()[:16])), freed=device.mem_info[0] >= free)
pool = cupy.cuda.MemoryAsyncPool()
with cupy.cuda.using_allocator(pool.malloc):
    held, error = fill(lambda size: cupy.empty(size, dtype=cupy.uint8), OUT_OF_MEMORY, 64 * MIB)
    say(asynchronous=error, held=len(held) > 0)
    held.clear()
    device.synchronize()
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    y = x * 3
    stream.synchronize()
    stream.begin_capture()
    cupy.multiply(x, 2, out=y)
    graph = stream.end_capture()
for _ in range(3):
    graph.launch(stream)
stream.synchronize()
say(graph="launched")
