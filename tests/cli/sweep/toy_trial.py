"""A trial that trains nothing: logs a few rows to W&B, and does what it is told.

    python toy_trial.py lr=0.1 rows=5 crash_at=0.1 hold=FILE started=FILE

The metric `val/loss` is `(log10(lr) + 2)**2 + 1 / step`, least at lr=0.01. With
`crash_at` the trial of that rate ends with an error after its second row; with `hold`
each, or the one of the rate `hold_at`, waits after its second row until the file is
there; SIGTERM ends it with exit code 0 after the row that is being logged, as a
graceful training does. `started` is a file that each trial writes a line into.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path

import wandb


def main(words: list[str]) -> int:
    pairs = (word.lstrip("-").partition("=") for word in words)
    options = {name: value for name, _, value in pairs}
    lr = float(options["lr"])
    crashes = lr == float(options.get("crash_at", -1))
    waits = "hold" in options and lr == float(options.get("hold_at", lr))
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    run = wandb.init(settings=wandb.Settings(console="off", x_disable_stats=True))
    if "started" in options:
        with open(options["started"], "a") as file:
            file.write(f"{run.id} {lr}\n")
    for step in range(1, int(options.get("rows", 5)) + 1):
        if step == 3 and crashes:
            print("toy_trial: the GPU fell off the bus", file=sys.stderr)
            run.finish(exit_code=3)
            return 3
        run.log({"val/loss": (math.log10(lr) + 2) ** 2 + 1 / step, "step": step})
        while step == 2 and waits and not (stopped or Path(options["hold"]).exists()):
            time.sleep(0.02)
        if stopped:
            break
    run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
