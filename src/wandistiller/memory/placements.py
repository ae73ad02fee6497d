"""All placements by name: importing this module registers every one."""

from wandistiller.memory import auto as _auto
from wandistiller.memory import spread as _spread
from wandistiller.memory.placement import PLACEMENTS, find_placement

__all__ = ["PLACEMENTS", "find_placement"]
_REGISTERED = (_auto, _spread)
