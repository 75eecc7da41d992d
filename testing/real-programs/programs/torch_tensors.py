"""PyTorch: an allocator at the limit, an operator that it meets late, a graph, a shared tensor.

The argument is the allocator's configuration, as in PYTORCH_ALLOC_CONF.
"""

import os
import sys

if len(sys.argv) > 1:
    os.environ["PYTORCH_ALLOC_CONF"] = sys.argv[1]

import torch
import torch.multiprocessing
from report import MIB, fill, say


def consume(queue, done):
    tensor = queue.get()
    done.put((tensor.numel(), torch.cuda.mem_get_info()[1]))


def main():
    device = torch.device("cuda", 0)
    x = torch.ones(256, 256, device=device)
    torch.relu(x @ x).sum()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    say(devices=torch.cuda.device_count(), total=total)
    take = lambda size: torch.empty(size, dtype=torch.uint8, device=device)
    held, error = fill(take, torch.OutOfMemoryError, 32 * MIB)
    say(oom=error, held=len(held) > 0)
    small, error = fill(take, torch.OutOfMemoryError, 2 * MIB)
    say(small=error)
    for name in ("sort", "multinomial", "cumsum"):
        try:
            getattr(torch, name)(x[0], *([1] if name == "multinomial" else [0]))
            say(late=name, result="success")
        except torch.OutOfMemoryError as error:
            say(late=name, result=type(error).__name__)
    held.clear()
    small.clear()
    torch.cuda.empty_cache()
    say(after=[tuple(torch.sort(x[0])[0].shape), tuple(torch.cumsum(x[0], 0).shape)])
    graph, y = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        torch.add(x, 1, out=y)
    graph.replay()
    torch.cuda.synchronize()
    say(graph="replayed")
    if "cudaMallocAsync" in sys.argv[-1]:
        # PyTorch does not share tensors of this allocator.
        return
    spawn = torch.multiprocessing.get_context("spawn")
    queue, done = spawn.Queue(), spawn.Queue()
    child = spawn.Process(target=consume, args=(queue, done))
    child.start()
    queue.put(torch.empty(64 * MIB, dtype=torch.uint8, device=device))
    numel, total = done.get(timeout=240)
    child.join()
    say(shared=numel, total=total)


if __name__ == "__main__":
    main()
    sys.exit(0)
