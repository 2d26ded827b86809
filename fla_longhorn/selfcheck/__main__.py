import sys

from fla_longhorn.selfcheck import main

sys.exit(main())
