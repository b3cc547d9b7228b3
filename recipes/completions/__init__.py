"""Fine-tuning on prompts and completions, of which only the completions count."""

from .completions import CompletionLM, Completions

__all__ = ["CompletionLM", "Completions"]
