"""ONNX Runtime: two sessions on the CUDA provider, the limit, sessions with a full share and after.

Its arena keeps freed memory.
"""

import gc

import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper
from report import MIB, fill, say

onnxruntime.set_default_logger_severity(4)
onnxruntime.preload_dlls()
OUT_OF_MEMORY = RuntimeError
PROVIDER = ("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})


def session(operator):
    weights = helper.make_tensor(
        "w", TensorProto.FLOAT, [256, 256], numpy.ones((256, 256), numpy.float32).tobytes(), raw=True
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node(operator, ["m"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [16, 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [16, 256])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=[PROVIDER])


def run(built):
    return list(built.run(None, {"x": numpy.ones((16, 256), numpy.float32)})[0].shape)


first = session("Relu")
late = session("Sigmoid")
say(provider=first.get_providers()[0], shape=run(first), late=run(late))


def take(size):
    return onnxruntime.OrtValue.ortvalue_from_shape_and_type([size], numpy.uint8, "cuda", 0)


held, error = fill(take, OUT_OF_MEMORY, 64 * MIB)
say(oom=error, held=len(held) * 64 * MIB)
say(still=run(first))
pieces = len(held)
held.clear()
gc.collect()
held = [take(64 * MIB) for _ in range(pieces)]
say(after=run(late))
