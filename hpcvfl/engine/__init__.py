"""The loop and what it needs; read round.py first."""
