"""``python -m wandistiller`` is ``wandistiller``."""

import sys

from wandistiller.cli.main import start

sys.exit(start())
