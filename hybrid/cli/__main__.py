"""`python -m hybrid.cli`: the command line where no console script is installed."""

from hybrid.cli import main

main()
