"""``python -m wandistiller`` is ``wandistiller``."""

import sys

from wandistiller.cli.main import main

sys.exit(main())
