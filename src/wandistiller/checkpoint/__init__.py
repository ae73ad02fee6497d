"""Checkpoints that leave this program: export to the formats that others load, each proved by reloading."""
