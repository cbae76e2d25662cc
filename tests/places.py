"""Where the project and its test data lie."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "config"
SHARED = ROOT.parent / "shared"  # real text and a real model, where they are at hand
