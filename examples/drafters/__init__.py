"""Drafters: whatever proposes the tokens that the target model then verifies."""

from drafters.base import Drafter
from drafters.prompt_lookup import PromptLookup

__all__ = ["Drafter", "PromptLookup"]
