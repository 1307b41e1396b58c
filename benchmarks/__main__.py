"""`python -m benchmarks NAME ...`, with the options of `onchip bench`."""

import sys

from onchip.cli import main

sys.exit(main(sys.argv[1:], command="bench", program="python -m benchmarks"))
