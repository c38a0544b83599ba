"""Benchmarks behind `hpcvfl bench`: one module per question, each with `main(argv) -> int`."""
