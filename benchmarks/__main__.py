"""`python -m benchmarks NAME ...`, with the options of `onchip bench`."""

import sys

from onchip.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
