"""JAX: compiled functions, the limit, a new function with a full share and after, a transfer."""

import gc
import os

# Kernels of the fake driver compute nothing: candidates cannot be compared.
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import jax
import jax.numpy as jnp
from report import MIB, fill, say

OUT_OF_MEMORY = jax.errors.JaxRuntimeError
device = jax.devices()[0]
say(devices=len(jax.devices()), platform=device.platform)
x = jnp.ones((512, 512), dtype=jnp.float32)
double = jax.jit(lambda a: jnp.sin(a) * 2 + 1)
double(x).block_until_ready()
jnp.dot(x, x).block_until_ready()
say(limit=device.memory_stats()["bytes_limit"])


def zeros(size):
    # A transfer from the host allocates and compiles nothing.
    return jnp.zeros(size, dtype=jnp.uint8).block_until_ready()


held, error = fill(zeros, OUT_OF_MEMORY, 64 * MIB)
say(oom=error, held=len(held) * 64 * MIB)
# A function that the program meets when its memory is full.
late = jax.jit(lambda a: jnp.cumsum(a, axis=0))
try:
    late(x).block_until_ready()
    say(late="success")
except OUT_OF_MEMORY as error:
    say(late=type(error).__name__)
held.clear()
gc.collect()
say(after=list(late(x).block_until_ready().shape))
say(host=list(jax.device_get(x).shape))
