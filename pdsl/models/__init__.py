"""Reference models, in plain torch: nothing in them knows of PDSL.

- `gpt`: a decoder that predicts the next token, with rotary or learned positions.
- `vit`: an encoder that classifies small images.
"""

from __future__ import annotations

from pdsl.models.gpt import GPT, gpt
from pdsl.models.vit import ViT, vit

__all__ = ["GPT", "ViT", "gpt", "vit"]
