"""Check that an image has the build of torch that its device needs.

    python torch_build.py DEVICE "$TORCH_INDEX"

Without an index of builds for CPUs, pip has only the build with CUDA for x86. That is
told. With such an index it is a mistake, and ends the build of the image.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions


def message(packages: list[str], device: str, index: str) -> str:
    """What to say of the installed packages.

    Args:
        packages: their names.
        device: the build argument DEVICE.
        index: the build argument TORCH_INDEX.

    Raises:
        SystemExit: they do not suit the device.
    """
    if device not in ("cpu", "cuda"):
        raise SystemExit(f"DEVICE: must be cpu or cuda, received {device!r}.")
    of_cuda = sorted(name for name in packages if name.startswith("nvidia-"))
    if device == "cuda" and not of_cuda:
        raise SystemExit(
            f"DEVICE=cuda: the torch that was installed has no CUDA, with TORCH_INDEX "
            f"{index!r}. Name an index that has one with CUDA for this machine."
        )
    if device == "cpu" and of_cuda and index:
        raise SystemExit(
            f"TORCH_INDEX: must name an index with this torch for CPUs, received "
            f"{index!r}: {len(of_cuda)} packages of CUDA were installed, such as "
            f"{of_cuda[0]}."
        )
    if device == "cpu" and of_cuda:
        return (
            f"trainkit | this image for CPUs carries {len(of_cuda)} packages of CUDA: "
            f"torch's usual build needs them; --build-arg TORCH_INDEX=... names an "
            f"index with a build that does not"
        )
    return f"trainkit | packages of CUDA in this image: {len(of_cuda)}"


if __name__ == "__main__":
    names = [each.metadata["Name"].lower() for each in distributions()]
    print(message(names, *sys.argv[1:]))
