import sys; sys.path.insert(0,"benchmarks"); sys.path.insert(0,".")
import os
import torch, matmul_pairs, multidevice
from fuser import DataType
from multidevice import Communicator
from torch.profiler import profile, ProfilerActivity
comm=Communicator.instance(); d=comm.size(); r=comm.rank(); torch.cuda.set_device(comm.local_rank()); dev=torch.device("cuda",comm.local_rank())
cases=[a.split(",") for a in sys.argv[1:]]
for op,m,k,n in cases:
    m,k,n=int(m),int(k),int(n)
    define={"ag":matmul_pairs.define_gather,"rs":matmul_pairs.define_scatter,"ar":matmul_pairs.define_allreduce}[op]
    fd,tx,tw,y=define("unchunked",d,m,k,n,DataType.BFloat16)
    g=torch.Generator(device=dev).manual_seed(0)
    x=multidevice.shard_tensor(torch.randn(m,k,device=dev,generator=g).bfloat16(),tx); w=multidevice.shard_tensor(torch.randn(n,k,device=dev,generator=g).bfloat16(),tw)
    for _ in range(12): fd.execute([x,w])
    torch.cuda.synchronize(); comm.barrier()
    with profile(activities=[ProfilerActivity.CUDA,ProfilerActivity.CPU]) as p:
        for _ in range(6): fd.execute([x,w])
        torch.cuda.synchronize()
    if r==0:
        ev=[e for e in p.events() if e.device_type==torch.autograd.DeviceType.CUDA]; ev.sort(key=lambda e:e.time_range.start)
        kk=len(ev)//6; last=ev[-2*kk:-kk]; t0=last[0].time_range.start
        print(op,m,k,n,"events",kk,"span",last[-1].time_range.end-t0, "period", ev[-kk].time_range.start-t0)
        for e in last: print(f"{e.time_range.start-t0:8.1f} {e.time_range.end-t0:8.1f} dur {e.time_range.end-e.time_range.start:7.1f} s{getattr(e,'device_resource_id','')} {e.name[:50]}")
    comm.barrier()
