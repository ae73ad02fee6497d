"""The command line: parsing only. What a command does is the Python function of the same name in ``wandistiller.api``."""
