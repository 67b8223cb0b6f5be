"""Numeric core of SpecDiff-2: tensors in, tensors out. Imports torch only."""

__version__ = "0.0.0"  # Hugging Face ships a package of this name, and transformers 5.0-5.12 reads its version
