"""A trial that trains nothing: logs a few rows to W&B, and does what it is told.

    python toy_trial.py lr=0.1 rows=5 pause=0.2 crash_at=0.1 hold=FILE started=FILE

The metric `val/loss` is `(log10(lr) + 2)**2 + 1 / step`, least at lr=0.01. With
`crash_at` the trial of that rate ends with an error after its second row; with `hold`
each, or the one of the rate `hold_at`, waits after its second row until the file is
there; SIGTERM ends it with exit code 0 after the row that is being logged, as a
graceful training does. `started` is a file that each trial writes a line into.
`optimizer.lr` is the same as `lr`.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import wandb

DEFAULTS = {"lr": "0.1", "rows": "5", "pause": "0", "crash_at": "-1"}


class Trial:
    def __init__(self, argv: list[str]) -> None:
        words = (word.lstrip("-").partition("=") for word in argv)
        given = {name.removeprefix("optimizer."): value for name, _, value in words}
        self.options = {**DEFAULTS, **given}
        self.lr = float(self.options["lr"])
        self.must_stop = False
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        run = wandb.init(settings=wandb.Settings(console="off", x_disable_stats=True))
        self._say_started(run.id)
        for step in range(1, int(self.options["rows"]) + 1):
            if step == 3 and self.lr == float(self.options["crash_at"]):
                print("toy_trial: the GPU fell off the bus", file=sys.stderr)
                run.finish(exit_code=3)
                return 3
            loss = (math.log10(self.lr) + 2) ** 2 + 1 / step
            run.log({"val/loss": loss, "step": step})
            time.sleep(float(self.options["pause"]))
            if step == 2:
                self._hold()
            if self.must_stop:
                break
        run.finish()
        return 0

    def _say_started(self, name: str) -> None:
        if "started" in self.options:
            with open(self.options["started"], "a") as file:
                file.write(f"{name} {self.lr}\n")

    def _hold(self) -> None:
        if self.lr != float(self.options.get("hold_at", self.lr)):
            return
        path = Path(self.options.get("hold", "/"))
        while not path.exists() and not self.must_stop:
            time.sleep(0.02)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self.must_stop = True


if __name__ == "__main__":
    sys.exit(Trial(sys.argv[1:]).run())
