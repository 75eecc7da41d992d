"""NCCL by PyTorch: two processes on two GPUs, collectives, in a graph and with full shares, and
DistributedDataParallel.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from report import MIB, fill, say


def train(rank):
    """Trains a model with DistributedDataParallel, which reduces gradients while it computes others.

    Kernels of the fake driver move no data, so that the processes cannot compare their models at
    the beginning: without init_sync.
    """
    layers = [torch.nn.Linear(512, 512) for _ in range(8)]
    model = torch.nn.Sequential(*layers).cuda()
    model = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[rank], init_sync=False, bucket_cap_mb=1
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(64, 512, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return sum(parameter.grad is not None for parameter in model.parameters())


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
    gradients = train(rank)
    say(rank=rank, gradients=gradients, total=torch.cuda.mem_get_info()[1], oom=error, held=taken > 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        processes.spawn(work, args=(2, os.path.join(directory, "store")), nprocs=2)
    say(processes="ended")
