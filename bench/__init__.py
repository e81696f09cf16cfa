"""Measurements against baselines of the same run. `python -m bench [--quick]`, as root, writes bench/results/."""
