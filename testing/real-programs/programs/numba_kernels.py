"""Numba: a kernel of its own compiler, memory at the limit."""

import numpy
from numba import cuda
from report import MIB, fill, say


@cuda.jit
def add(x, y):
    i = cuda.grid(1)
    if i < x.size:
        x[i] += y[i]


context = cuda.current_context()
free, total = context.get_memory_info()
say(devices=len(cuda.gpus), total=total)
x = cuda.to_device(numpy.ones(4096, dtype=numpy.float32))
add[16, 256](x, x)
cuda.synchronize()
say(kernel="launched")
held, error = fill(
    lambda size: cuda.device_array(size, dtype=numpy.uint8), cuda.cudadrv.driver.CudaAPIError, 64 * MIB
)
say(oom=error, held=len(held) * 64 * MIB)
del held
context.deallocations.clear()
add[16, 256](x, x)
cuda.synchronize()
say(after="launched")
