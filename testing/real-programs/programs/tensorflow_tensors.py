"""TensorFlow: operators and functions, the limit, a new operator with a full share and after."""

import ctypes
import glob
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
# Kernels of the fake driver write nothing, also not the zones that show writes out of bounds.
os.environ["TF_DISABLE_RZ_CHECK"] = "1"
# On a H100 TensorFlow leaves 1.8 GiB to the driver, which is nearly all of the share.
os.environ["TF_DEVICE_MIN_SYS_MEMORY_IN_MB"] = "512"

import nvidia

# TensorFlow's search path lacks this one of NVIDIA's packages.
(solver,) = glob.glob(os.path.join(nvidia.__path__[0], "cusolver/lib/libcusolver.so.*"))
ctypes.CDLL(solver, ctypes.RTLD_GLOBAL)

import tensorflow as tf
from report import MIB, fill, say

OUT_OF_MEMORY = tf.errors.ResourceExhaustedError


def succeeds(operator):
    try:
        operator()
        return True
    except tf.errors.OpError:
        # Not only the error of its allocator: a plan of cuFFT fails with InternalError.
        return False


gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[:1], "GPU")
tf.config.experimental.set_memory_growth(gpus[0], True)
x = tf.ones((512, 512))
image, filters = tf.ones((1, 64, 64, 3)), tf.ones((3, 3, 3, 8))
say(device=tf.matmul(x, x).device[-5:])
compiled = tf.function(lambda a: tf.reduce_sum(tf.nn.relu(a) * 2 + 1))
compiled(x)
# TensorFlow aborts if it first needs cuSOLVER when the GPU is full, with and without the interceptor.
tf.linalg.cholesky(x)
say(convolution=list(tf.nn.conv2d(image, filters, 1, "SAME").shape))
held, error = fill(lambda size: tf.zeros(size // 4), OUT_OF_MEMORY, 64 * MIB)
say(oom=error, held=len(held) * 64 * MIB)
late = [
    lambda: tf.signal.fft(tf.cast(x, tf.complex64)),
    lambda: tf.math.top_k(x[0], 4),
]
say(late=len([succeeds(operator) for operator in late]))
held.clear()
say(after=[succeeds(operator) for operator in late])
say(host=list(tf.sort(x).numpy().shape), peak=tf.config.experimental.get_memory_info("GPU:0")["peak"])
