from tests.lit.test_ranks import *
from tests.lit.test_refusals import Stream
from torch.utils.data import DataLoader, IterableDataset
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from trainkit.lit import refusals
from datetime import timedelta
import sys, time
def stream(rank, world, numbers):
    refusals.PATIENCE=timedelta(seconds=2)
    fit=trainer(2,strategy="ddp",devices=world,callbacks=[AccumulationCallback(PerToken())])
    fit.fit(TokenModule(), DataLoader(Stream(numbers[rank]),batch_size=None))
    return fit.global_step
class Liar(Stream):
    def __len__(self): return 6
def liar(rank, world, numbers):
    refusals.PATIENCE=timedelta(seconds=2)
    fit=trainer(2,strategy="ddp",devices=world,callbacks=[AccumulationCallback(PerToken())])
    fit.fit(TokenModule(), DataLoader(Liar(numbers[rank]),batch_size=None))
    return fit.global_step
def bucket_view(rank, world):
    return train(rank, world, "callback", {"strategy": DDPStrategy(gradient_as_bucket_view=True), "optimizer":"adamw"})
class UnusedLast(TwoHeads):
    pass
def unused_last(rank, world):
    m=TwoHeads(dtype=torch.float64)
    trainer(2,strategy="ddp",devices=world,max_steps=1,use_distributed_sampler=False,callbacks=[AccumulationCallback(PerToken())]).fit(m, rank_loader(DATA,4,rank,world))
    return weights(m)
def unsharded(rank, world):
    m=TokenModule(dtype=torch.float64)
    trainer(2,strategy=ModelParallelStrategy(data_parallel_size=2,tensor_parallel_size=1,process_group_backend="gloo"),devices=world,use_distributed_sampler=False,callbacks=[AccumulationCallback(PerToken())]).fit(m, rank_loader(DATA,4,rank,world))
    return weights(m)
def show(name, f, *a, world=2):
    t=time.time()
    try:
        for r in run_ranks(f, world, *a, timeout=25):
            print(name, "->", str(r)[:300].replace("\n"," | "))
    except AssertionError as e: print(name, "HUNG", e)
    print("   ", time.time()-t)
if __name__=="__main__":
    show("zero batches", stream, [0,3])
    show("zero batches", stream, [3,0])
    show("liar", liar, [4,6])
    show("liar", liar, [5,6])
    show("liar both", liar, [5,5])
    show("unused_last", unused_last)
    rs=run_ranks(unsharded,2); print("unsharded", [str(r)[:200] for r in rs], rs[0].equal(rs[1]) if torch.is_tensor(rs[0]) else "")
    start=TokenModule(dtype=torch.float64); ref=TokenModule(dtype=torch.float64,optimizer="adamw")
    train_on_windows(ref, windows_over_ranks(DATA,4,2,2))
    print("bucket view",[deviation(r,ref,start) for r in raise_rank_errors(run_ranks(bucket_view,2))])
