"""`python -m onchip ...` is the command line `onchip ...`, installed or not."""

import sys

from onchip.cli import main

sys.exit(main())
