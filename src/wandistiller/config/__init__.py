"""What every command can be told, as frozen dataclasses, and strict TOML for it. No torch here: ``--help`` is instant."""
