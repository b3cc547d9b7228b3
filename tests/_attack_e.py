from tests.lit.test_ranks import *
from tests.lit.test_manual import ManualModule
from tests.lit.test_rank_checkpoints import FromBatch, off_big_batch, DATA as D32
from lightning.pytorch.callbacks import *
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from trainkit.lit import refusals
from datetime import timedelta
import sys, time
from tests._attack_c import show
from trainkit import WindowMonitor
def ckpt_steps(rank, world, folder):
    # ModelCheckpoint by time inside windows
    cb=ModelCheckpoint(folder, train_time_interval=timedelta(milliseconds=1), save_top_k=-1)
    m=TokenModule(dtype=torch.float64, optimizer="adamw")
    trainer(4,strategy="ddp",devices=world,max_epochs=1,enable_checkpointing=True,use_distributed_sampler=False,callbacks=[AccumulationCallback(PerToken()),cb]).fit(m, FromBatch(rank,world,0))
    return weights(m)
class Fail(TokenModule):
    def training_step(self, batch, batch_idx):
        if batch_idx==5: raise ValueError("user")
        return super().training_step(batch,batch_idx)
def on_exc(rank, world, folder):
    m=Fail(dtype=torch.float64)
    trainer(4,strategy="ddp",devices=world,max_epochs=1,enable_checkpointing=True,use_distributed_sampler=False,callbacks=[AccumulationCallback(PerToken()),OnExceptionCheckpoint(folder)]).fit(m, FromBatch(rank,world,0))
class Val(AccumulationMixin, TokenModule):
    accumulation=PerToken()
    def validation_step(self,batch,batch_idx):
        self.log_exact("v", token_loss_(self.net,batch), batch)
from tests.helpers import token_loss as token_loss_
def val_inside(rank, world, folder):
    m=Val(dtype=torch.float64, optimizer="adamw")
    t=trainer(4,strategy="ddp",devices=world,max_epochs=1,val_check_interval=3,use_distributed_sampler=False,callbacks=[WindowMonitor(1)])
    t.fit(m, FromBatch(rank,world,0), FromBatch(rank,world,0))
    return weights(m)
class M2(ManualModule):
    pass
def manual_ckpt(rank, world, resume, save, skip=0):
    from tests.lit.test_rank_checkpoints import Save
    m=ManualModule(dtype=torch.float64, optimizer="adamw")
    m.apart = True
    t=trainer(4,strategy="ddp" if world>1 else "auto",devices=world,max_epochs=1,use_distributed_sampler=False,callbacks=[Save(**save)] if save else [])
    t.fit(m, FromBatch(rank,world,skip), ckpt_path=resume)
    return weights(m)
def manual_ckpt_sync(rank, world, resume, save, skip=0):
    from tests.lit.test_rank_checkpoints import Save
    m=ManualModule(dtype=torch.float64, optimizer="adamw")
    t=trainer(4,strategy="ddp" if world>1 else "auto",devices=world,max_epochs=1,use_distributed_sampler=False,callbacks=[Save(**save)] if save else [])
    t.fit(m, FromBatch(rank,world,skip), ckpt_path=resume)
    return weights(m)
if __name__=="__main__":
    import tempfile
    f=tempfile.mkdtemp()
    print("ckpt by time", off_big_batch(run_ranks(ckpt_steps,2,f,timeout=30)))
    show("on exception", on_exc, f)
    print("val inside", off_big_batch(run_ranks(val_inside,2,f,timeout=30)))
    for fn in (manual_ckpt, manual_ckpt_sync):
        p=f+f"/m{fn.__name__}.ckpt"
        print("manual save", off_big_batch(run_ranks(fn,2,None,{"path":p,"after":6},timeout=30)))
        print("manual resume 2", off_big_batch(run_ranks(fn,2,p,None,6,timeout=30)))
        print("manual resume 1", off_big_batch(run_ranks(fn,1,p,None,6,timeout=30)))
