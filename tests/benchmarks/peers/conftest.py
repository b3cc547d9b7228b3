"""Each framework is imported in an environment of its own, and not by pytest."""

from __future__ import annotations

collect_ignore_glob = ["peer_*.py"]
