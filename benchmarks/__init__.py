"""What is measured, and how: `python -m benchmarks --help`, and README.md beside this file."""
