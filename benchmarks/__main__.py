"""`python -m benchmarks NAME ...`: the options are those of `onchip bench`."""

import sys

from onchip.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
