from tests.lit.test_manual import *
from tests.lit.test_monitor import recorded, by_hand
from tests.lit.test_exact_log import Evaluated, EVAL
from trainkit import *
from lightning.pytorch.callbacks import OnExceptionCheckpoint, ModelCheckpoint, Timer
import warnings, traceback, sys
warnings.simplefilter("ignore")
class Zeroes(ManualModule):
    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.accumulate(self.loss(batch), batch)
        if self.window_ends(batch_idx):
            self.finish_window(); self.optimizers().step()
def attempt(name, f):
    try: print(name, "->", f())
    except BaseException as e: print(name, "RAISED", type(e).__name__, str(e)[:300])
class NoOpt(TokenModule):
    def configure_optimizers(self): return None
class LogsFloat(Evaluated):
    def validation_step(self, batch, batch_idx): self.log_exact("a", 0.5, batch)
class LogsVector(Evaluated):
    def validation_step(self, batch, batch_idx): self.log_exact("a", torch.ones(3), batch)
class LogsNeg(Evaluated):
    def validation_step(self, batch, batch_idx): self.log_exact("a", torch.ones(()), weight=-1)
from trainkit import AccumulationCallback
attempt("zero_grad inside", lambda: off_big_batch(fitted(Zeroes(dtype=torch.float64))))
attempt("no optimizer", lambda: trainer(4,callbacks=[AccumulationCallback(PerToken())]).fit(NoOpt(), loader(DATA,4)))
attempt("log float", lambda: trainer().validate(LogsFloat(), loader(EVAL,4),verbose=False))
attempt("log vector", lambda: trainer().validate(LogsVector(), loader(EVAL,4),verbose=False))
attempt("log neg", lambda: trainer().validate(LogsNeg(), loader(EVAL,4),verbose=False))
m=ManualModule(dtype=torch.float64); m.every=4
attempt("every: gap", lambda: (recorded(m, accumulate=1, max_epochs=1).of_windows()))
attempt("hand", lambda: by_hand()[0])
class MC(AccumulationMixin, TokenModule):
    accumulation=PerToken()
attempt("save outside fit", lambda: trainer().save_checkpoint("/tmp/x.ckpt"))
class FinishTwice(ManualModule):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if self.window_ends(batch_idx): self.finish_window()
attempt("finish twice", lambda: fitted(FinishTwice()))
class NoStep(ManualModule):
    def training_step(self, batch, batch_idx):
        self.accumulate(self.loss(batch), batch)
        self.optimizers().zero_grad()
attempt("never finish", lambda: fitted(NoStep()))
class Mixes(ManualModule):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        if self.window_ends(batch_idx): self.optimizers().step(); self.optimizers().zero_grad()
attempt("manual_backward only", lambda: fitted(Mixes()))
class Outside(ManualModule): pass
attempt("accumulate outside trainer", lambda: ManualModule().accumulate(torch.ones(())))
attempt("window_ends outside trainer", lambda: ManualModule().window_ends(1))
attempt("log_exact outside", lambda: MC().log_exact("a", torch.ones(()), weight=1))
