"""Collectives of NCCL's among the one process on one GPU, which has to find again what it gave. One line of JSON."""
import json
import tempfile

import torch
import torch.distributed as dist

dist.init_process_group("nccl", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
given = torch.randn(1 << 24, device="cuda")
reduced, gathered, sent = given.clone(), [torch.empty_like(given)], given.clone()
dist.all_reduce(reduced)
dist.all_gather(gathered, given)
dist.broadcast(sent, 0)
torch.cuda.synchronize()
found = [reduced, gathered[0], sent]
print(json.dumps({"right": sum(torch.equal(given, each) for each in found), "of": len(found)}))
dist.destroy_process_group()
