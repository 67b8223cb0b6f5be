"""Report stage: cells and training curves -> tables, figures and one page to read."""
