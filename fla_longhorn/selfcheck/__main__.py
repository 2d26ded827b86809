"""`python -m fla_longhorn.selfcheck`."""

import sys

from fla_longhorn.selfcheck import main

sys.exit(main())
