"""The blocks of the joint network: a tower at each party, a head at the server."""

from hpcvfl.models.build import build_head, build_tower

__all__ = ["build_head", "build_tower"]
