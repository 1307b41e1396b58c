"""The exit codes of every command; docs/commands.md lists them for scripts."""

OK = 0
FAILED = 1  # a threshold is missed, or a check failed
USAGE = 2  # an invalid option or argument, or a file that cannot be used
NOT_SERVED = 3  # a valid request that nothing here serves, or a package that is not installed
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT, as shells count
BROKEN_PIPE = 141  # the reader of the output ended first: 128 + SIGPIPE
