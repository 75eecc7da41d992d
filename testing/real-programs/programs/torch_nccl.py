"""NCCL by PyTorch: two processes on two GPUs, collectives, in a graph and with full shares.

Kernels of the fake driver move no data: DistributedDataParallel, which compares the models of its
processes by a collective, cannot begin.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from report import MIB, fill, say


def work(rank, world, store):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    ones = torch.ones(16 * MIB // 4, device="cuda")
    for _ in range(3):
        dist.all_reduce(ones)
        dist.broadcast(ones, 0)
        dist.reduce_scatter_tensor(ones[: ones.numel() // world], ones)
    torch.cuda.synchronize()
    held, error = fill(
        lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"),
        torch.OutOfMemoryError,
        64 * MIB,
    )
    dist.all_reduce(ones)
    torch.cuda.synchronize()
    taken = len(held)
    held.clear()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(ones)
    graph.replay()
    torch.cuda.synchronize()
    # NCCL ends a communicator after the graphs that use it.
    graph.reset()
    say(rank=rank, total=torch.cuda.mem_get_info()[1], oom=error, held=taken > 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        processes.spawn(work, args=(2, os.path.join(directory, "store")), nprocs=2)
    say(processes="ended")
