"""`python -m trainkit`: the same as the command."""

from trainkit.cli.main import run

if __name__ == "__main__":
    run()
