"""A wide-area network on one machine: what README.md in this folder describes."""
