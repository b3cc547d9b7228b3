"""What the last word of each line may become: `python answers.py LINE...` as JSON.

An answer ends its process, so that each line has a fork.
"""

from __future__ import annotations

import json
import os
import sys

from trainkit.cli.main import main


def answer(line: str) -> list[str]:
    reading, writing = os.pipe()
    if not os.fork():
        os.dup2(writing, sys.stdout.fileno())
        try:
            main(["completion", "--query", line])
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answered:
        words = answered.read().split()
    os.wait()
    return words


if __name__ == "__main__":
    print(json.dumps({line: answer(line) for line in sys.argv[1:]}))
