"""Finds and rewrites CUDA-centric PyTorch code for Google TPUs."""

from pathlib import Path

__version__ = "0.1.0"

# In an installed distribution `rules` and `runtime` are sub-packages of this one.  In a bare checkout they
# stand beside it, as their users asked: then the checkout's root is searched for them too.
if not (Path(__path__[0]) / "rules").is_dir():
    __path__.append(str(Path(__path__[0]).parent))
