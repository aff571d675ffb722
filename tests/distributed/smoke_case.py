from tests.distributed.models import *
import time, torch.distributed as dist
def smoke(seed):
    t=time.time(); out=[]
    for s in range(seed, seed+8):
        spec=random_spec(s); spec=ModelSpec.from_json(__import__("json").loads(__import__("json").dumps(spec.to_json())))
        t=time.time()
        job=Job.build(spec, random_plan(spec, dist.get_world_size(), s), s); a=time.time()-t
        t=time.time(); job.train(3); b=(time.time()-t)/3
        t=time.time(); g=gather(job); c=time.time()-t
        out.append((s,round(a,3),round(b,3),round(c,3), len(g)))
    return [out, sorted(g)]
def bad(): 
    if dist.get_rank()==1: raise ValueError("x")
    dist.barrier()
def hang():
    import time
    if dist.get_rank()==1: time.sleep(100)
