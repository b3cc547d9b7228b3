from tests.helpers import *
from trainkit import *
class MX(AccumulationMixin, TokenModule):
    accumulation = PerToken()
def lit(rank, world, kind, kw):
    data=ragged_sequences(38)
    m = MX(dtype=torch.float64) if kind=="mixin" else TokenModule(dtype=torch.float64)
    cbs=[AccumulationCallback(PerToken()), WindowMonitor(1)] if kind=="cb" else []
    t=trainer(2, strategy=kw.get("strategy","ddp"), devices=world, use_distributed_sampler=False, callbacks=cbs)
    t.fit(m, rank_loader(data,4,rank,world))
    return weights(m)
if __name__=="__main__":
    import time
    data=ragged_sequences(38)
    # big batch with 2 ranks: window = 2 micro x 2 ranks x 4, distributed sampler interleaves
    import sys
    for world in (2,):
        start=TokenModule(dtype=torch.float64)
        big=TokenModule(dtype=torch.float64)
        opt=OPTIMIZERS["sgd"](big.parameters())
        shares=[list(range(r,38,world)) for r in range(world)]
        for ep in range(2):
            for i in range(0,19,8):
                idx=[j for s in shares for j in s[i:i+8]]
                opt.zero_grad(); token_loss(big.net,pad([data[j] for j in idx])).backward(); opt.step()
        for kind in ("plain","cb","mixin"):
            s=time.time()
            rs=raise_rank_errors(run_ranks(lit,world,kind,{}))
            print(world,kind,[deviation(r,big,start) for r in rs], time.time()-s)
        for st in ("ddp_find_unused_parameters_true",):
            print(st,[deviation(r,big,start) for r in raise_rank_errors(run_ranks(lit,world,"cb",{"strategy":st}))])
