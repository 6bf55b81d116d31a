import sys; sys.path.insert(0,"benchmarks"); sys.path.insert(0,".")
import statistics, time
import torch, matmul_pairs, multidevice
from fuser import DataType
from fuser.frontend.program_cache import PROGRAMS
from hostir import auto_overlap
from multidevice import Communicator
from torch.profiler import profile, ProfilerActivity
comm=Communicator.instance(); d=comm.size(); r=comm.rank(); torch.cuda.set_device(comm.local_rank()); dev=torch.device("cuda",comm.local_rank())
plain=auto_overlap.pick
def run(op,m,k,n,force,prof):
    if force:
        auto_overlap.pick=lambda cs,*_: next(c for c in cs if c.name==force)
    else: auto_overlap.pick=plain
    PROGRAMS.clear()
    define={"ag":matmul_pairs.define_gather,"rs":matmul_pairs.define_scatter,"ar":matmul_pairs.define_allreduce}[op]
    fd,tx,tw,y=define("unchunked",d,m,k,n,DataType.BFloat16)
    g=torch.Generator(device=dev).manual_seed(0)
    x=multidevice.shard_tensor(torch.randn(m,k,device=dev,generator=g).bfloat16(),tx); w=multidevice.shard_tensor(torch.randn(n,k,device=dev,generator=g).bfloat16(),tw)
    for _ in range(12): fd.execute([x,w])
    torch.cuda.synchronize(); comm.barrier()
    times=[]
    for _ in range(10):
        comm.barrier(); a,b=(torch.cuda.Event(enable_timing=True) for _ in range(2)); a.record()
        for _ in range(8): fd.execute([x,w])
        b.record(); torch.cuda.synchronize(); times.append(a.elapsed_time(b)/8)
    if r==0: print("TIME",op,m,k,n,force or "auto",f"{statistics.median(times):.4f} ({min(times):.4f}-{max(times):.4f}) ms", fd.overlap_report([x,w]).splitlines()[-1][:0], flush=True)
    if prof:
        with profile(activities=[ProfilerActivity.CUDA,ProfilerActivity.CPU]) as p:
            for _ in range(6): fd.execute([x,w])
            torch.cuda.synchronize()
        if r==0:
            ev=[e for e in p.events() if e.device_type==torch.autograd.DeviceType.CUDA]; ev.sort(key=lambda e:e.time_range.start)
            kk=len(ev)//6; last=ev[-2*kk:-kk]; t0=last[0].time_range.start
            print("PROF",op,m,k,n,force,"events",kk,"span",last[-1].time_range.end-t0, "period", ev[-kk].time_range.start-t0)
            for e in last: print(f"{e.time_range.start-t0:8.1f} {e.time_range.end-t0:8.1f} dur {e.time_range.end-e.time_range.start:7.1f} s{getattr(e,'device_resource_id','')} {e.name[:50]}", flush=True)
    comm.barrier()
for a in sys.argv[1:]:
    op,m,k,n,*rest=a.split(",")
    force=",".join(rest).strip().replace("+"," ")
    prof=force.endswith("!"); force=force.rstrip("!").replace(":",", ")
    try: run(op,int(m),int(k),int(n),force,prof)
    except Exception as e:
        if r==0: print("ERR",a,type(e).__name__,str(e)[:300],flush=True)
        raise
