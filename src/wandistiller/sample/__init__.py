"""From a checkpoint and a prompt to pictures and clips."""
