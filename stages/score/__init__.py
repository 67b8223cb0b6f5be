"""Scoring: which answers are right. Apart from generation: it needs the texts and the prompts, and no model."""
